"""Whether samples have a distribution."""

import torch


def chance_of(samples, vocab, probabilities):
    """The chance that so odd a set of samples comes from a distribution (chi-square test).

    samples: int64 [n, tokens]; probabilities: [vocab ** tokens], in the order of the tokens. Cells
    that expect less than 5 samples are taken together.
    """
    cells = torch.zeros(len(samples), dtype=torch.int64)
    for column in samples.T:
        cells = cells * vocab + column
    counted = torch.bincount(cells, minlength=len(probabilities)).double()
    expected = probabilities.double() / probabilities.double().sum() * len(samples)
    if counted[expected == 0].any():
        return 0.0
    rare = expected < 5
    counted = torch.cat([counted[~rare], counted[rare].sum().view(1)])
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    real = expected > 0
    statistic = ((counted - expected)[real] ** 2 / expected[real]).sum()
    freedom = (real.sum() - 1).double()
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
