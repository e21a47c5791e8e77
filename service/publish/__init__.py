"""From committed units to a complete dataset folder, and from there to the Hub."""
