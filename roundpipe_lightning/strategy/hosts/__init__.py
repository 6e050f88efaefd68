"""Several hosts, one process each: how they meet, agree, and what each gets of the data."""
