"""Every resampled statistic against numpy, scipy and scikit-learn on the sample that was physically repeated."""

import itertools

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from analysis import bootstrap

RESAMPLES = 40
SIZES = [(1, 1), (1, 40), (3, 7), (12, 2), (12, 300), (70, 30), (70, 400)]  # few documents, and more than FEW_DOCUMENTS


class Sample:
    """Rows of some documents, of unequal number, with or without ties, and the rows of each resample."""

    def __init__(self, documents, rows, ties, seed=0):
        rng = np.random.default_rng([seed, documents, rows, ties])
        self.document = np.sort(rng.integers(0, documents, rows) * rng.integers(0, 2, rows))
        rng.shuffle(self.document)
        self.x = rng.integers(0, 4 if ties else 10**6, rows).astype(float)
        self.y = np.round(self.x / self.x.max(initial=1) + rng.normal(size=rows), 1 if ties else 12)
        self.label = rng.random(rows) < 0.4
        self.multiplicity = bootstrap.draw(documents, RESAMPLES, seed)
        self.expanded = [
            [row for row in range(rows) for _ in range(drawn[self.document[row]])] for drawn in self.multiplicity
        ]

    def expect(self, statistic, defined=lambda rows: len(rows) > 0):
        return np.array([statistic(rows) if defined(rows) else np.nan for rows in self.expanded])


@pytest.fixture(params=itertools.product(SIZES, (False, True)), ids=str)
def sample(request):
    (documents, rows), ties = request.param
    return Sample(documents, rows, ties)


@pytest.mark.parametrize("q", [0.0, 0.3, 0.5, 0.99, 1.0])
def test_quantile(sample, q):
    got = bootstrap.resampled_quantile(sample.x, sample.document, sample.multiplicity, q)
    np.testing.assert_allclose(got, sample.expect(lambda rows: np.quantile(sample.x[rows], q)), rtol=1e-12)


def test_median_with_infinite_values(sample):
    x = np.where(sample.x >= np.median(sample.x), np.inf, sample.x)
    got = bootstrap.resampled_quantile(x, sample.document, sample.multiplicity, 0.5)
    np.testing.assert_array_equal(got, sample.expect(lambda rows: np.median(x[rows])))


def test_mean(sample):
    got = bootstrap.resampled_mean(sample.x, sample.document, sample.multiplicity)
    np.testing.assert_allclose(got, sample.expect(lambda rows: np.mean(sample.x[rows])), rtol=1e-12)


def test_auc(sample):
    want = sample.expect(
        lambda rows: sklearn.metrics.roc_auc_score(sample.label[rows], sample.x[rows]),
        lambda rows: len(set(sample.label[rows])) == 2,
    )
    got = bootstrap.resampled_auc(sample.x, sample.label, sample.document, sample.multiplicity)
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_spearman(sample):
    want = sample.expect(
        lambda rows: scipy.stats.spearmanr(sample.x[rows], sample.y[rows]).statistic,
        lambda rows: min(len(set(sample.x[rows])), len(set(sample.y[rows]))) > 1,
    )
    got = bootstrap.resampled_spearman(sample.x, sample.y, sample.document, sample.multiplicity)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def test_both_ways_through_the_resamples_agree(monkeypatch):
    sample = Sample(12, 500, True)
    arrays = sample.document, sample.multiplicity
    few = (
        bootstrap.resampled_auc(sample.x, sample.label, *arrays),
        bootstrap.resampled_spearman(sample.x, sample.y, *arrays),
    )
    monkeypatch.setattr(bootstrap, "FEW_DOCUMENTS", 0)
    monkeypatch.setattr(bootstrap, "BLOCK_CELLS", 1500)  # three resamples a block
    many = (
        bootstrap.resampled_auc(sample.x, sample.label, *arrays),
        bootstrap.resampled_spearman(sample.x, sample.y, *arrays),
    )
    np.testing.assert_allclose(few, many, rtol=1e-12)


def test_a_resample_does_not_depend_on_the_order_of_the_rows():
    sample = Sample(12, 300, True)
    order = np.random.default_rng(5).permutation(300)
    for function, sides in (
        (bootstrap.resampled_auc, (sample.x, sample.label)),
        (bootstrap.resampled_spearman, (sample.x, sample.y)),
    ):
        straight = function(*sides, sample.document, sample.multiplicity)
        shuffled = function(*(side[order] for side in sides), sample.document[order], sample.multiplicity)
        np.testing.assert_array_equal(straight, shuffled)


def test_draws_are_documents_with_replacement():
    drawn = bootstrap.draw(12, 20000, 3)
    assert drawn.shape == (20000, 12)
    assert (drawn.sum(axis=1) == 12).all()
    chance = [scipy.stats.binom.pmf(k, 12, 1 / 12) for k in range(5)]
    found = [(drawn == k).mean() for k in range(5)]
    np.testing.assert_allclose(found, chance, atol=0.005)
    assert (bootstrap.draw(12, 50, 3) == bootstrap.draw(12, 50, 3)).all()
    assert (bootstrap.draw(12, 50, 3) != bootstrap.draw(12, 50, 4)).any()


def test_plain_quantile_where_numpy_gives_nan():
    values = np.array([1.0, 2.0, np.inf, np.inf, np.inf])
    assert bootstrap.plain_quantile(values, 0.99) == np.inf
    assert bootstrap.plain_quantile(values, 0.25) == 2.0
    assert bootstrap.plain_quantile(values, 0.125) == 1.5
    assert bootstrap.plain_quantile(values, 0.3) == np.inf
    assert bootstrap.plain_quantile(values, 0.5) == np.inf


def test_interval_is_the_percentile_interval_of_the_resampled_statistics():
    statistics = np.random.default_rng(0).normal(size=1000)
    assert bootstrap.interval(statistics) == pytest.approx(tuple(np.percentile(statistics, [2.5, 97.5])))
    statistics[:50] = np.nan
    assert bootstrap.interval(statistics) == pytest.approx(tuple(np.percentile(statistics[50:], [2.5, 97.5])))
    statistics[50] = np.nan
    assert bootstrap.interval(statistics) == (None, None)


def test_no_interval_below_ten_documents():
    values = np.random.default_rng(0).random(90)
    nine, ten = np.arange(90) % 9, np.arange(90) % 10
    few = bootstrap.median(values, nine, bootstrap.draw(9))
    assert (few.low, few.high) == (None, None)
    assert few.value == np.median(values)
    enough = bootstrap.median(values, ten, bootstrap.draw(10))
    assert enough.low < enough.value < enough.high
    # Ten documents were read, but the rows that enter come from nine of them.
    assert bootstrap.median(values[ten < 9], ten[ten < 9], bootstrap.draw(10)).low is None


def test_nothing_to_estimate():
    nothing, none = np.array([]), np.array([], dtype=np.int64)
    draws = bootstrap.draw(12)
    assert bootstrap.median(nothing, none, draws).columns("x") == {"x": None, "x_low": None, "x_high": None}
    assert bootstrap.share(nothing.astype(bool), none, draws).value is None
    assert bootstrap.plain_spearman(np.array([1.0]), np.array([2.0])) is None
    assert bootstrap.plain_spearman(np.ones(5), np.arange(5.0)) is None
    assert bootstrap.plain_auc(np.arange(3.0), np.array([True] * 3)) is None


@pytest.mark.parametrize(
    ("differences", "p", "shown"),
    [
        ([1.0] * 1000, 0.0, "< 0.002"),
        ([1.0] * 999 + [-1.0], 0.002, "0.002"),
        ([-1.0] * 990 + [1.0] * 10, 0.02, "0.02"),
        ([1.0] * 500 + [-1.0] * 500, 1.0, "1"),
        ([0.0] * 1000, 1.0, "1"),
        ([0.0] * 10 + [1.0] * 990, 0.02, "0.02"),
        ([np.nan] * 60 + [1.0] * 940, None, "-"),
    ],
)
def test_p_value(differences, p, shown):
    found = bootstrap.sign_p_value(np.array(differences))
    assert found == pytest.approx(p) if p is not None else found is None
    assert bootstrap.format_p(found, 1000) == shown
    assert bootstrap.format_p(0.0, 10000) == "< 0.0002"


@pytest.mark.parametrize(("documents", "known"), [(3, 0.73), (5, 0.84), (10, 0.89), (20, 0.93)])
def test_coverage_falls_short_of_its_level_as_known(documents, known):
    assert bootstrap.coverage(documents) == pytest.approx(known, abs=0.025)


def test_coverage_of_one_document_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        bootstrap.coverage(1)


@pytest.mark.long
@pytest.mark.parametrize("documents", [3, 5, 10, 20])
def test_coverage_measured_anew(documents):
    rng = np.random.default_rng(documents)
    hits = 0
    for _ in range(1500):
        values = rng.normal(size=documents)
        found = scipy.stats.bootstrap(
            (values,), np.mean, n_resamples=1000, method="percentile", rng=rng
        ).confidence_interval
        hits += found.low <= 0 <= found.high
    assert bootstrap.coverage(documents) == pytest.approx(hits / 1500, abs=0.035)
