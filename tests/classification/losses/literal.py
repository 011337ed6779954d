"""The formulas of the losses, transcribed with loops over samples, classes and bins in plain Python floats.

Nothing here is shared with the library: probabilities come from `math.exp`, kernels from `math.lgamma`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Row = Sequence[float]


def softmax(row: Row) -> list[float]:
    top = max(row)
    parts = [math.exp(z - top) for z in row]
    return [part / sum(parts) for part in parts]


def entropy(p: Row) -> float:
    return -sum(q * math.log(q) for q in p if q > 0)


def argmax(p: Row) -> int:
    return max(range(len(p)), key=lambda c: p[c])


def cross_entropy(P: Sequence[Row], y: Sequence[int]) -> float:
    return sum(-math.log(p[k]) for p, k in zip(P, y, strict=True)) / len(P)


def focal(P: Sequence[Row], y: Sequence[int], gamma: float) -> float:
    return sum(-((1 - p[k]) ** gamma) * math.log(p[k]) for p, k in zip(P, y, strict=True)) / len(P)


def fl53(P: Sequence[Row], y: Sequence[int]) -> float:
    return sum(focal([p], [k], 5 if p[k] < 0.2 else 3) for p, k in zip(P, y, strict=True)) / len(P)


def inverse_focal(P: Sequence[Row], y: Sequence[int], gamma: float) -> float:
    return sum(-((1 + p[k]) ** gamma) * math.log(p[k]) for p, k in zip(P, y, strict=True)) / len(P)


def dual_focal(P: Sequence[Row], y: Sequence[int], gamma: float, *, released: bool) -> float:
    total = 0.0
    for p, k in zip(P, y, strict=True):
        if released:
            strongest = max([q for q in p if q < p[k]], default=0.0)
        else:
            strongest = max(q for c, q in enumerate(p) if c != k)
        total -= (1 - p[k] + strongest) ** gamma * math.log(p[k])
    return total / len(P)


def score(p: Row, name: str) -> float:
    ordered = sorted(p)
    return {
        "msp": ordered[-1],
        "margin": ordered[-1] - ordered[-2],
        "negative_entropy": 1 - entropy(p) / math.log(len(p)),
    }[name]


def aurc(P: Sequence[Row], y: Sequence[int], name: str) -> float:
    """Average over all coverages of the mean cross-entropy of the most confident samples; no two equally confident."""
    order = sorted(range(len(P)), key=lambda i: score(P[i], name))
    risks = []
    for first in range(len(P)):
        kept = order[first:]
        risks.append(sum(-math.log(P[i][y[i]]) for i in kept) / len(kept))
    return sum(risks) / len(risks)


def aurc_log(P: Sequence[Row], y: Sequence[int], name: str) -> float:
    order = sorted(range(len(P)), key=lambda i: score(P[i], name))
    n = len(P)
    return sum(-math.log(1 - r / (n + 1)) * -math.log(P[i][y[i]]) for r, i in enumerate(order, 1)) / n


def au_p(P: Sequence[Row], y: Sequence[int], name: str, kappa: float, nu: float, n_bins: int) -> float:
    g = [score(p, name) for p in P]
    n = len(g)
    counts = [0] * n_bins
    for value in g:
        counts[min(int(value * n_bins), n_bins - 1)] += 1

    def cdf(x: float) -> float:
        value = sum(h / (1 + math.exp(-(x - (k + 0.5) / n_bins) / nu)) for k, h in enumerate(counts)) / n
        return min(max(value, 1 / (n + 1)), n / (n + 1))

    below = math.floor(kappa * n)
    tau = sorted(g)[below] if below < n else math.inf
    total = 0.0
    for i in range(n):
        beta = -math.log(1 - cdf(g[i])) if g[i] < tau else -math.log(1 - cdf(tau))
        total += beta * -math.log(P[i][y[i]])
    return total / n


def mmce_m(P: Sequence[Row], y: Sequence[int], bandwidth: float) -> float:
    r = [max(p) for p in P]
    a = [float(argmax(p) == k) for p, k in zip(P, y, strict=True)]
    n = len(P)
    pairs = ((i, j) for i in range(n) for j in range(n))
    return sum((a[i] - r[i]) * (a[j] - r[j]) * math.exp(-abs(r[i] - r[j]) / bandwidth) for i, j in pairs) / n**2


def mmce_w(P: Sequence[Row], y: Sequence[int], bandwidth: float) -> float:
    r = [max(p) for p in P]
    right = [i for i, (p, k) in enumerate(zip(P, y, strict=True)) if argmax(p) == k]
    wrong = [i for i in range(len(P)) if i not in right]
    m, w = len(right), len(wrong)

    def k(i: int, j: int) -> float:
        return math.exp(-abs(r[i] - r[j]) / bandwidth)

    cc = sum((1 - r[i]) * (1 - r[j]) * k(i, j) for i in right for j in right) / m**2
    ww = sum(r[i] * r[j] * k(i, j) for i in wrong for j in wrong) / w**2
    cw = sum((1 - r[i]) * r[j] * k(i, j) for i in right for j in wrong) / (m * w)
    return math.sqrt(cc + ww - 2 * cw + 1e-10)


def dirichlet(x: Row, alpha: Row) -> float:
    log_norm = math.lgamma(sum(alpha)) - sum(math.lgamma(a) for a in alpha)
    return math.exp(log_norm + sum((a - 1) * math.log(v) for a, v in zip(alpha, x, strict=True)))


def kde(P: Sequence[Row], Y: Sequence[Row], h: float, p: float, columns: int) -> float:
    """(1/n) Σ_j Σ_c |π_jc - f_jc|^p over the first `columns` classes."""
    n = len(P)
    total = 0.0
    for j in range(n):
        weights = [0.0 if i == j else dirichlet(P[j], [f / h + 1 for f in P[i]]) for i in range(n)]
        for c in range(columns):
            pi = sum(weights[i] * Y[i][c] for i in range(n)) / sum(weights)
            total += abs(pi - P[j][c]) ** p
    return total / n


def kde_canonical(P: Sequence[Row], y: Sequence[int], h: float, p: float) -> float:
    return kde(P, [[float(c == k) for c in range(len(P[0]))] for k in y], h, p, len(P[0]))


def kde_marginal(P: Sequence[Row], y: Sequence[int], h: float, p: float) -> float:
    classes = range(len(P[0]))
    binary = [([[q[c], 1 - q[c]] for q in P], [[float(c == k), float(c != k)] for k in y]) for c in classes]
    return sum(kde(scores, targets, h, p, 1) for scores, targets in binary)


def kde_top_label(P: Sequence[Row], y: Sequence[int], h: float, p: float) -> float:
    hits = [float(argmax(q) == k) for q, k in zip(P, y, strict=True)]
    return kde([[max(q), 1 - max(q)] for q in P], [[a, 1 - a] for a in hits], h, p, 1)


def avuc(P: Sequence[Row], y: Sequence[int], kappa: float) -> float:
    cells = dict.fromkeys(("AC", "AU", "IC", "IU"), 0.0)
    for p, k in zip(P, y, strict=True):
        r, h = max(p), entropy(p)
        accurate, certain = argmax(p) == k, h <= kappa
        amount = (r if accurate else 1 - r) * ((1 - math.tanh(h)) if certain else math.tanh(h))
        cells[("A" if accurate else "I") + ("C" if certain else "U")] += amount
    return math.log(1 + (cells["AU"] + cells["IC"]) / (cells["AC"] + cells["IU"]))


def s_avuc(P: Sequence[Row], y: Sequence[int], kappa: float, temperature: float) -> float:
    n = dict.fromkeys(("AC", "AU", "IC", "IU"), 0.0)
    for p, k in zip(P, y, strict=True):
        h = entropy(p)
        level = h / math.log(len(p))
        odds = math.log(level * (1 - kappa) / ((1 - level) * kappa)) / temperature
        t = 1 / (1 + math.exp(-odds))
        if argmax(p) == k:
            n["AU"] += t * math.tanh(h)
            n["AC"] += (1 - t) * (1 - math.tanh(h))
        else:
            n["IC"] += (1 - t) * (1 - math.tanh(h))
            n["IU"] += t * math.tanh(h)
    return math.log(1 + (n["AU"] + n["IC"]) / (n["AC"] + n["IU"]))


def sb_ece(
    P: Sequence[Row], y: Sequence[int], n_bins: int, temperature: float, p: float, *, label_binned: bool
) -> float:
    c = [max(q) for q in P]
    a = [float(argmax(q) == k) for q, k in zip(P, y, strict=True)]
    u = []
    for value in c:
        logits = [-((value - (j + 0.5) / n_bins) ** 2) / temperature for j in range(n_bins)]
        u.append(softmax(logits))
    n = len(P)
    total = 0.0
    for j in range(n_bins):
        size = sum(u[i][j] for i in range(n))
        if size == 0:
            continue
        accuracy = sum(u[i][j] * a[i] for i in range(n)) / size
        confidence = sum(u[i][j] * c[i] for i in range(n)) / size
        if label_binned:
            total += sum(u[i][j] * abs(accuracy - c[i]) ** p for i in range(n)) / n
        else:
            total += size / n * abs(accuracy - confidence) ** p
    return total ** (1 / p)
