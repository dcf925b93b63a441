"""How a call is recognised: what is known of one that looks the same, so that each is traced once."""

from remat.plan.calls.alike import Met as Met
from remat.plan.calls.alike import Regions as Regions
from remat.plan.calls.cache import graph_of as graph_of
from remat.plan.calls.cache import paths_of as paths_of
from remat.plan.calls.looking import looked as looked
from remat.plan.calls.looking import looking as looking
from remat.plan.calls.ran import RanRegions as RanRegions
from remat.plan.calls.trusted import Trust as Trust
from remat.plan.calls.trusted import trust_in as trust_in
