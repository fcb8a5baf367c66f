"""Which drafter, and how deep: survival tables, cycle costs, and the choice between them."""
