"""Sources of tasks: tables of rows, selectors of their order, and mixes of several tasksets."""
