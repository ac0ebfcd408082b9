"""Tools for testing planners and whatever runs plans; needs the extra ``testing``.

Hypothesis strategies (:mod:`pipeloom.testing.strategies`), what must hold for every plan
(:mod:`pipeloom.testing.invariants`), and a hunt for plans where it does not
(:mod:`pipeloom.testing.fuzz`, the command ``pipeloom fuzz``).

>>> from hypothesis import given, settings
>>> @settings(max_examples=5, database=None)
... @given(plans())
... def every_stage_runs(plan):
...     assert plan.num_ops >= plan.num_stages
>>> every_stage_runs()
"""

from pipeloom.testing.strategies import costs, layouts, mutations, plans, shapes

__all__ = ["costs", "layouts", "mutations", "plans", "shapes"]
