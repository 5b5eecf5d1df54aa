"""Training corpora of exact token ids: what is taken out of recorded episodes, the gates that it passes, and its card.

``records`` rows and files, ``select`` which trajectories are taken, ``rerender`` the byte-exact gate, ``contamination`` and
``duplicates`` the audits, ``gates`` everything that a finished corpus is checked against, ``build`` and ``card`` how it is made.
"""
