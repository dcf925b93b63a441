"""How a call is recognised: what is known of one that looks the same, so that each is traced once."""

from remat.plan.calls.alike import Met as Met, Regions as Regions
from remat.plan.calls.cache import graph_of as graph_of, paths_of as paths_of
from remat.plan.calls.looking import looked as looked, looking as looking
from remat.plan.calls.ran import RanRegions as RanRegions
from remat.plan.calls.trusted import Trust as Trust, trust_in as trust_in
