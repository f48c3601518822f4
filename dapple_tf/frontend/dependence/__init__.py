"""Find out how every tensor of a captured loss depends on the rows of the batch."""
