"""What estimates refuse."""


class EstimateError(ValueError):
    """Nothing can be estimated: which value, and what was expected."""
