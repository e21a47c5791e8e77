"""Says why a drafter's acceptance is what it is: its forward pass over rows of a dataset of its target.

Data goes drafter + rows -> readings -> acceptance -> what was tried -> verdict -> page. The forward pass is
speculators' own. Imports torch: import it lazily.
"""
