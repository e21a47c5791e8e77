"""Explains a drafter's acceptance by running its forward pass over rows of a dataset of its target.

Data flow: drafter + rows -> predictions -> acceptance -> what was tried -> verdict -> page. The forward pass
is speculators' own. Imports torch: import it lazily.
"""
