from ledger.accounts import Ledger
from ledger.report import balances


def test_balances():
    ledger = Ledger()
    ledger.open("bank")
    ledger.open("cash")
    ledger.deposit("cash", 5)
    assert balances(ledger) == "bank: 0\ncash: 5"
