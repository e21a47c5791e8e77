"""Trainers' own commands on a finished dataset, whose states are read where they are: no second copy."""
