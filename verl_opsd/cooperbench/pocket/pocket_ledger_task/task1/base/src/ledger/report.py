"""Text report of a ledger."""


def balances(ledger):
    """One line an account: its name, a colon and its balance."""
    lines = []
    for account in ledger.accounts():
        lines.append(f"{account}: {ledger.balance(account)}")
    return "\n".join(lines)
