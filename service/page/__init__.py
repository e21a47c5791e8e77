"""The page for people: read-only HTML of what the store holds, a file for each noun."""
