"""The history of the tables, one file a step; `Store.migrate` runs what is missing."""
