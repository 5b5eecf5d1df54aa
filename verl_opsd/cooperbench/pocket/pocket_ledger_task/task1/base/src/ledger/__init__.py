"""Accounts and their report."""
