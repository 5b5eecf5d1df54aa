"""A ledger of accounts with whole-number amounts."""


class UnknownAccount(KeyError):
    """No account of that name."""


class Ledger:
    """Balances by account name. Every change is appended to ``history`` as (account, amount)."""

    def __init__(self):
        self._balances = {}
        self.history = []

    def open(self, account):
        """Opens an account with balance 0; an account that is open stays as it is."""
        self._balances.setdefault(account, 0)

    def balance(self, account):
        """Balance of an account."""
        if account not in self._balances:
            raise UnknownAccount(account)
        return self._balances[account]

    def deposit(self, account, amount):
        """Adds an amount to an account."""
        self._balances[account] = self.balance(account) + amount
        self.history.append((account, amount))

    def withdraw(self, account, amount):
        """Takes an amount from an account."""
        self._balances[account] = self.balance(account) - amount
        self.history.append((account, -amount))

    def accounts(self):
        """Names of the accounts, in the order they were opened."""
        return list(self._balances)

    def total(self):
        """Sum of all balances."""
        return sum(self._balances.values())
