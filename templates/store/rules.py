"""What runs on the servers: they import it by name."""


def sgd(held, pushed):
    """A step of gradient descent: `held` is the parameter, `pushed` the gradient (under bsp: everyone's)."""
    return held - 0.05 * pushed


def shrink(keys, rows, by):
    """Weight decay, once, where the rows lie."""
    return rows * by
