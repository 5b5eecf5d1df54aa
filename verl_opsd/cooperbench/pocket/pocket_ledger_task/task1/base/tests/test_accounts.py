import pytest

from ledger.accounts import Ledger, UnknownAccount


@pytest.fixture
def ledger():
    ledger = Ledger()
    ledger.open("cash")
    ledger.open("bank")
    return ledger


def test_deposit_and_withdraw(ledger):
    ledger.deposit("cash", 10)
    ledger.withdraw("cash", 4)
    assert ledger.balance("cash") == 6
    assert ledger.history == [("cash", 10), ("cash", -4)]


def test_unknown_account(ledger):
    with pytest.raises(UnknownAccount):
        ledger.deposit("piggy", 1)


def test_total(ledger):
    ledger.deposit("cash", 1)
    ledger.deposit("bank", 2)
    assert ledger.total() == 3
