"""From a unit to a committed attempt: the engine, the link to the connector, the capture loop."""
