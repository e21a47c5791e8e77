"""Looks at a node before GPU hours are paid for: its engine, machine, database and Hub token."""
