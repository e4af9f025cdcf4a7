"""Measures the tables of README and docs/results.md on one commit, and writes the pages out of the raw results.

`rows` says what is measured, `measure` gathers it in a folder, `runs` reads such folders and refuses those of two commits,
`figures` and `tables` make blocks of pages, `pages` puts them between their markers.
"""
