"""The race: a policy that is already worse than the one to beat need not be scored on the images that are left.

Races of 1,500 made-up policies on 100 images, 25 policies at a time against the tenth best so far, 50 seeds each: how often the ten
best were those of a whole scoring, and the share of the work saved. By the spread of an image about its policy's mean, in
units of the spread of the policies' means:

| confidence | spread 0.5      | spread 2        | spread 6        |
|------------|-----------------|-----------------|-----------------|
| 0.95       | 49 of 50, 84%   | 39 of 50, 76%   | 34 of 50, 52%   |
| 0.99       | 50 of 50, 84%   | 48 of 50, 68%   | 46 of 50, 32%   |
| 0.999      | 50 of 50, 82%   | 50 of 50, 57%   | 50 of 50, 14%   |

A race looks several times, and the policy to beat was chosen for its low values, so it errs more often than a single test does:
take a confidence of 0.999 where the ten must be the same.
"""

import math

from torch import Tensor

from gradveil.core.errors import GradveilError

FEWEST = 5  # images below which a spread says too little


def worse(values: Tensor, bar: Tensor, confidence: float) -> Tensor:
    """True where a policy's mean is above the bar's, by a one-sided t-test on the differences image by image.

    `values` are (policies, images), `bar` (images) those of the policy to beat; lower is better. With fewer than five images none
    is called worse. Differences that are all alike need no test: above 0 they are worse.
    """
    from scipy.stats import t

    if values.ndim != 2 or bar.shape != values.shape[1:]:
        raise GradveilError(f"values of shape {tuple(values.shape)} and a bar of {tuple(bar.shape)}: expected (policies, images), (images)")
    if not 0.5 <= confidence < 1:
        raise GradveilError(f"confidence {confidence}: choose from 0.5 to below 1, such as 0.99")
    differences = values.double() - bar.double()
    n = differences.shape[1]
    if n < FEWEST or not len(differences):
        return differences.new_zeros(len(differences)).bool()
    # mean / (std / sqrt n) > t, without the division: a spread of zero leaves mean > 0
    return differences.mean(1) * math.sqrt(n) > float(t.ppf(confidence, n - 1)) * differences.std(1)
