"""Faults by a table, judged from outside."""
