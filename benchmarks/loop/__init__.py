"""The proof by training: what drafters of our states get accepted, beside the peer's and wrong ones'."""
