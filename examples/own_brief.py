"""A brief of your own: the peer's task and a house rule that only the teacher reads.

    PYTHONPATH=$PWD/examples VERL_USE_EXTERNAL_MODULES=own_brief \\
        python -m verl.trainer.main_ppo +recipe=opd opsd.brief.name=peer_spec+house_rules

verl imports the module in every process of the run, while verl itself is being imported: keep its top level light.
"""

from verl_opsd.privilege import Brief, Case, Section, compose, register_brief

RULES = """# House rules

Name the files that you are about to change in one message to your peer before the first edit."""


def house_rules(case: Case) -> Brief:
    """Guidance, the same for both agents. ``case`` holds the agent's id, its peers' task texts and facts about the task."""
    return compose(Section("house_rules", "guidance", RULES), name="house_rules")


register_brief("house_rules", house_rules)
