"""The intermediate representation: graphs, their text form and their invariants."""
