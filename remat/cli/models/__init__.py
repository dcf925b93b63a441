"""What a sweep trains: transformers as functions of their parameters, and the text they read."""

from remat.cli.models.hf import (
    Loss,  # of a transformers model whose layers are wrapped as a row of the sweep says
    build_hf,  # a transformers model of a config type, with random weights
    config_of,  # the config of a type, at sizes of one's own
    module_of,  # the causal language model of a config
    settings,  # sizes by the names that configs share
    transformers_for,  # the package, or a line that says how to install it
)
from remat.cli.models.published import (
    check_published,  # that there is such a model
    published,  # a published model on the meta device, and the keywords of a step of it
)
from remat.cli.models.shapes import (
    VOCAB,  # bytes
    Model,  # parameters and their loss
    Params,
    Sizes,  # depth, width, heads, positions
    Wrap,  # what a row of the sweep puts around each block
    fresh,  # leaves of their own
)
from remat.cli.models.text import (
    batches,  # endless random windows of the corpus
    corpus,  # the standard library's own sources
)
from remat.cli.models.transformer import (
    FAMILIES,  # the models written here, by name
    build,  # the model called `gpt`, `llama` or `hf:NAME`
    normal,  # a parameter
    rotate,  # rotary positions
)
