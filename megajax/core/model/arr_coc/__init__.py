"""The networks of ARR-COC, which choose how many tokens each region of an image gets."""
