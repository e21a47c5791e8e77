"""From a request to frozen samples: target, source, template, tokens, loss mask, units."""
