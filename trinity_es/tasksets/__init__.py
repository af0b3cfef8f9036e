"""Which tasks come next: tables of rows, their selectors, and mixes of several."""
