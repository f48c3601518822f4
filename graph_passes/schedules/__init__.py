"""Pipeline schedules as data: the actions of every stage, and the policies that make them."""
