"""JAX-style functional rematerialization for PyTorch."""

from remat import interop as interop
from remat import nn as nn
from remat import transforms as transforms
from remat.api import remat as remat
from remat.inspection import Residual as Residual
from remat.inspection import print_saved_residuals as print_saved_residuals
from remat.inspection import saved_residuals as saved_residuals
from remat.layers import scan_layers as scan_layers
from remat.loops import while_remat as while_remat
from remat.names import checkpoint_name as checkpoint_name
from remat.opinfo import Decision as Decision
from remat.opinfo import OpInfo as OpInfo
from remat.policies import checkpoint_policy as checkpoint_policy
from remat.policies import offload_matmuls as offload_matmuls
from remat.policies import offload_names as offload_names
from remat.policies import save_all_but_names as save_all_but_names
from remat.policies import save_attention as save_attention
from remat.policies import save_everything as save_everything
from remat.policies import save_matmuls as save_matmuls
from remat.policies import save_names as save_names
from remat.policies import save_nothing as save_nothing
from remat.policies import save_ops as save_ops
from remat.policies import save_unbatched_matmuls as save_unbatched_matmuls
from remat.scan import scan_remat as scan_remat
from remat.transforms._errors import RematError as RematError
from remat.transforms._region import is_recomputing as is_recomputing
