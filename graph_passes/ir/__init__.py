"""The intermediate representation: graphs, their ops, their text form and their invariants."""
