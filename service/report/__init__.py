"""The page of `quarry verify --report`: counted while the rows are read, drawn as SVG, one file of HTML."""
