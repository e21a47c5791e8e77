"""What proves states right: head, logit check, canary, row proofs, `quarry verify`."""
