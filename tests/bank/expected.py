"""What becomes of a pair (program, way) where it is not "equal": torch refuses it without remat, too, or one
line says what is told instead, and why."""

from __future__ import annotations

from dataclasses import dataclass

from tests.bank.program import Program

# Ways whose calls take milliseconds.
CHEAP = set(
    "backward twice double partial accumulate two_forwards reversed again update batched drop grad "
    "grad_params vmap_grad jvp vjp grad_grad vmap value_and_grad vjp_twice grad_vmap buffers in_checkpoint "
    "in_scan counted cloned on_cpu no_grad copied plain_over_grad plain_over_vmap vmap_vmap_grad jvp_grad "
    "forward_ad".split()
)
LEVELS = (
    "grad grad_params vmap_grad jvp vjp hessian jacrev jacfwd grad_grad third mixed vmap_hessian linearize "
    "plain_over_grad plain_over_jvp plain_over_vmap jvp_grad vmap vmap_vmap_grad value_and_grad "
    "vjp_twice grad_vmap buffers buffers_vmap buffers_hessian buffers_grad forward_ad"
)


@dataclass(frozen=True)
class Expected:
    """What a pair is expected to do.

    `ways`: names of ways; `what`: names of programs, or tags; `kind`: of the verdict, or several; `says`: a
    pattern that what is told matches.
    """

    ways: str
    what: str
    kind: str
    says: str
    why: str


SAME = Expected("", "", "same", "", "")
OTHERWISE = (
    Expected(
        LEVELS,
        "ends_by_an_exception",
        "same refused",
        "ended by an exception|",
        "what leaves two levels by an exception has no derivatives: told",
    ),
    Expected(
        LEVELS,
        "python",
        "same refused failed",
        "does not repeat its forward|escaped|history|gradients|derivatives|",
        "the function runs again under torch.func: a count that an op reads is told, a list grows twice",
    ),
    Expected(
        "in_checkpoint counted cloned on_cpu",
        "torch.func",
        "same invalid",
        "saved tensor hooks|",
        "torch.func refuses hooks around a transform inside",
    ),
    Expected(
        LEVELS,
        "hessian_inside",
        "same failed invalid",
        "has_fw_view|Nested forward|",
        "a tangent that a region keeps is a view of one: an assertion of torch's own, loud",
    ),
    Expected(
        "plain_over_vmap grad_vmap vmap_vmap_grad",
        "write_that_one_level_differentiates",
        "same refused invalid",
        "does not repeat|inplace|",
        "autograd copies what it reads of an operand, in the run for one level and not for the other",
    ),
    Expected(
        "in_scan",
        "embedding_renormalized_beside_a_transform",
        "refused",
        "wrote into a captured tensor",
        "a step may not write to what it captures",
    ),
    Expected(
        "vmap_vmap_grad",
        "weight_that_no_walk_finds",
        "same standing",
        "",
        "a wrapper of a level that is gone, of which torch asserts",
    ),
    Expected(
        "in_checkpoint in_scan",
        "raw",
        "same failed invalid refused",
        "",
        "they run the function again, which draws other numbers past torch: the plain side is wrong",
    ),
    Expected(
        "vmap_grad plain_over_vmap vmap_vmap_grad grad_vmap vmap vmap_hessian",
        "result_kept_from_the_last_step",
        "invalid",
        "escaped|",
        "what is kept has a batch of a vmap that is over",
    ),
    Expected(
        LEVELS,
        "buffer_and_its_memory_set_to_another",
        "same invalid refused failed",
        "InferenceMode|",
        "`set_` of a tensor without data below levels: torch asserts in a look of a budget, and after it",
    ),
    Expected(
        LEVELS + " linearize counted cloned on_cpu",
        "raw",
        "same invalid refused",
        "",
        "no wrapper of torch.func has memory to fill; what a second run does not repeat is told",
    ),
    Expected(
        "vmap_grad plain_over_vmap vmap_vmap_grad grad_vmap vmap vmap_hessian",
        "numbers_of_what_is_overwritten columns_chosen_by_numbers",
        "invalid",
        "data|item",
        "vmap has no numbers for Python",
    ),
    Expected(
        "forward_ad",
        "loop_of_regions captured_result_that_no_tangent_reaches constants_written_viewed_and_drawn "
        "forward_jacobian_inside hessian_inside batch_norm_before_a_forward_derivative",
        "invalid",
        "inplace|Nested forward",
        "torch's formula for softmax's tangent, and forward mode in forward mode",
    ),
    Expected(
        "vmap_vmap_grad jvp",
        "result_that_no_tangent_reaches",
        "invalid",
        "out",
        "torch refuses `out=` there",
    ),
    Expected(
        "in_checkpoint",
        "buffers python state moving_average_replaced",
        "same failed invalid refused",
        "",
        "torch's checkpoint runs the function again, with what it has written: the plain side is wrong",
    ),
    Expected(
        LEVELS,
        "scripted_module",
        "same refused invalid failed",
        "TorchScript|change from run to run|derivatives|",
        "torch's optimized code refuses operands with batches, from the second call on, and its derivatives "
        "depend on how often it was called (docs/limits.md)",
    ),
    Expected(
        "counted",
        "cache_by_rows cache_of_the_first cached_table cache_of_a_draw_before_more_draws "
        "cache_of_a_sobol_sequence",
        "same failed",
        "unlike|",
        "the first call fills a cache, without remat, too",
    ),
    Expected(
        "in_scan",
        "stores python buffers state moving_average_replaced",
        "same failed refused",
        "",
        "a step that writes to what it captures is refused, and what it stores is of its last run",
    ),
    Expected(
        LEVELS,
        "tiles_that_count",
        "same invalid",
        "would mutate a captured|",
        "derivatives of torch.func refuse writes to what is captured",
    ),
    Expected(
        LEVELS,
        "forces_of_a_region",
        "same refused invalid",
        "twice at one level|does not repeat|",
        "a backward inside, through a region inside, is refused at levels of torch.func",
    ),
    Expected(
        LEVELS,
        "functional_jvp_inside tiles_that_accumulate",
        "same refused invalid failed",
        "",
        "torch refuses an old Function, and its own functional jvp, in most ways",
    ),
    Expected(
        LEVELS,
        "embedding_renormalized embedding_renormalized_beside_a_transform",
        "same refused invalid failed",
        "leaf Variable|argument|",
        "the embedding writes into its weight, which requires gradients: told where it is an operand",
    ),
    Expected(
        "grad_grad plain_over_grad third mixed jacrev",
        "data_scaled",
        "same refused invalid",
        "reads `.data`|",
        "a region that torch.func differentiates twice refuses `.data` (docs/limits.md)",
    ),
    Expected(
        LEVELS,
        "buffer_that_is_written_later buffers_that_come_to_overlap statistics_that_are_frozen "
        "memory_that_layers_share_or_do_not alias_of_numpys_in_later_calls constant_of_another_sign "
        "hooks_before_a_transform two_batch_norms_in_regions "
        "queue_that_is_pushed_around_a_region_inside "
        "mean_read_written_and_read counter_that_scales_in_regions state_among_the_arguments "
        "parts_of_a_state_among_the_arguments state_that_carries_a_derivative",
        "same invalid refused",
        "",
        "torch.func refuses writes to captured tensors, and hooks; and torch its own formula for copysign",
    ),
    Expected(
        LEVELS,
        "scan_that_captures_an_inference_tensor",
        "same invalid failed",
        "(?i)inference|",
        "torch.func refuses most that was made in inference mode",
    ),
    Expected(
        LEVELS + " in_scan",
        "dual_level_inside",
        "same invalid failed",
        "Nested forward|NoneType|",
        "torch has no forward mode in forward mode by plain dual levels, and steps of scans have it off",
    ),
    Expected(
        LEVELS + " in_checkpoint",
        "attribute_set_after_a_scan step_that_leads_to_what_a_region_stores result_stored_beside_loop",
        "same refused standing failed",
        "reads another tensor|level.has_value|CheckpointError|",
        "what is stored is of the run before: told below a vmap, and by torch's checkpoint in a later call",
    ),
    Expected(
        LEVELS,
        "seeds_and_states_beside_a_transform",
        "same refused",
        "returned other numbers|",
        "under forward mode over reverse a generator that is seeded inside is compared, and told",
    ),
    Expected(
        LEVELS,
        "table_that_a_region_inside_has_made",
        "same invalid standing",
        "level.has_value|",
        "a table that is cached under two levels: torch asserts",
    ),
    Expected(
        LEVELS,
        "branches_by_torch_cond",
        "same refused failed",
        "derivatives|False != True|jvp function|",
        "linearize of torch.cond is zero in torch itself (2.13); some others are loud",
    ),
    Expected(
        LEVELS,
        "scan_whose_later_steps_draw temperature_that_counts",
        "same invalid refused failed",
        "",
        "vmap has no numbers for Python, and torch's formula for softmax's tangent",
    ),
    Expected(
        "in_scan",
        "factor_that_counts temperature_that_counts power_that_counts factor_of_a_region_inside_that_counts "
        "factor_in_another_dtype_that_counts",
        "same invalid refused failed",
        "",
        "their results are no carries",
    ),
    Expected(
        LEVELS,
        "one_activation_on_two_layouts",
        "same failed",
        "derivatives|",
        "under torch.func dropout of what is not contiguous draws another mask (docs/limits.md)",
    ),
    Expected(
        LEVELS + " batched",
        "torch_cond_in_torch_cond",
        "same failed",
        "Expected FakeTensor|could not find kernel|",
        "torch.cond, which compiles itself, in torch.cond that a region under two levels keeps: loud",
    ),
    Expected(
        LEVELS,
        "force_in_later_calls force_of_a_region_inside force_of_a_stack penalty_two_regions_inside",
        "same refused invalid",
        "requires_grad_|reads another tensor|",
        "torch.func refuses a leaf inside, which a region may make in some ways (docs/limits.md)",
    ),
    Expected(
        LEVELS,
        "tiles_of_a_region",
        "same refused",
        "did not read in the forward|",
        "tiles of a region that keeps views or not all products, below two levels: loud",
    ),
    Expected(
        "result_written",
        "layer_norm mlp",
        "same refused",
        "written in place|",
        "a policy keeps all results of a normalization, and the caller writes to one of them",
    ),
    Expected(
        "third",
        "halves_of_its_own_primal",
        "same refused",
        "returned other tangents|",
        "the primal that it asks for has tangents by the levels that its second run is below",
    ),
    Expected("third", "forces", "refused invalid", "requires_grad_", "torch's own refusal"),
    Expected(
        "third",
        "cache_of_a_draw_before_more_draws",
        "refused invalid",
        "returned other numbers|",
        "what a table is made of is drawn again, where levels run the function again",
    ),
    Expected(
        "vmap vmap_grad vmap_vmap_grad plain_over_vmap grad_vmap vmap_hessian",
        "result_stored_beside_tiles",
        "invalid",
        "escaped",
        "a batch of torch's that is stored does not leave `vmap`",
    ),
    Expected(
        "hessian jacrev third mixed vmap_hessian plain_over_jvp",
        "checkpoints_of_torch_around_two_layers",
        "invalid",
        "saved",
        "torch's checkpoint at levels of torch.func",
    ),
    Expected(
        "mixed buffers_grad",
        "global_bound_anew",
        "same refused",
        "did not read in the forward|",
        "what a module names is bound anew between the levels' runs",
    ),
    Expected(
        "forward_ad in_checkpoint",
        "late_bound_layers_that_numpy_sees cache_of_a_sobol_sequence data_replaced_in_a_region_inside",
        "refused failed same",
        "CheckpointError|does not repeat|unlike|",
        "they run again as a whole: plain forward mode and torch's checkpoint save otherwise then",
    ),
    Expected(
        "forward_ad",
        "checkpoint_of_torch_inside map_in_place data_replaced",
        "refused failed same",
        "CheckpointError|does not repeat|",
        "plain forward mode in a region that runs again: torch's checkpoint, and memory written past torch",
    ),
    Expected(
        LEVELS, "argument", "refused invalid same", "", "a write to an argument is refused in every way"
    ),
    Expected(
        "backward twice partial accumulate two_forwards reversed again update drop counted cloned on_cpu "
        "double batched thread threads copied anomaly in_checkpoint in_scan two_ranks",
        "argument",
        "refused invalid",
        "argument|",
        "a recomputation would write again",
    ),
)
# What torch cannot run without remat, either: ways, by the names of groups of them, and programs.
GROUPS = {
    "FUNC": (
        "grad grad_grad grad_params grad_vmap hessian jacfwd jacrev jvp jvp_grad mixed plain_over_grad "
        "plain_over_jvp plain_over_vmap third value_and_grad vjp vjp_twice vmap vmap_grad vmap_hessian "
        "vmap_vmap_grad"
    ),
    "REVERSE": (
        "grad grad_grad jvp_grad plain_over_grad value_and_grad vjp vjp_twice vmap_grad vmap_vmap_grad"
    ),
    "HIGHER": "grad_grad hessian jacrev jvp_grad mixed third vmap_hessian",
    "BATCHES": "grad_vmap plain_over_vmap vmap vmap_grad vmap_hessian vmap_vmap_grad",
    "HOOKS": "cloned counted in_checkpoint on_cpu",
}
TORCH = (
    (
        "REVERSE HOOKS accumulate again anomaly backward batched buffers copied double drop forward_ad "
        "grad_params in_scan mixed partial plain_over_jvp reversed thread threads twice two_forwards "
        "update",
        "argument_written",
    ),
    (
        "FUNC batched buffers forward_ad linearize two_ranks",
        "layer_that_accumulates_in_its_backward reversible_pair",
    ),
    ("FUNC again in_scan reversed two_forwards", "queue_flat_view"),
    (
        "REVERSE HIGHER buffers double forward_ad grad_params grad_vmap jacfwd jvp linearize "
        "plain_over_jvp plain_over_vmap",
        "attention_in_torchs_checkpoint",
    ),
    (
        "FUNC buffers forward_ad linearize",
        "attribute_on_a_context dirty_function function_that_transforms_in_its_backward old_function "
        "partly_saving_function raw_fill",
    ),
    (
        "REVERSE HIGHER again grad_params grad_vmap in_scan jacfwd jvp plain_over_jvp reversed two_forwards",
        "counter_assigned",
    ),
    (
        "FUNC buffers",
        "accumulating_backward_inside backward_of_a_layer_inside cache_of_a_sobol_sequence "
        "data_replaced data_replaced_in_a_region_inside gradient_through_batch_norm "
        "late_bound_layers_that_numpy_sees map_in_place number_from_numpy numpy_in_a_region_inside "
        "written_through_numpy",
    ),
    ("FUNC forward_ad", "queue_of_features"),
    (
        "FUNC",
        "batch_norm_before_a_forward_derivative "
        "batch_norm_twice convolution_and_batch_norm "
        "queue_pushed_in_a_region_inside queue_shifted ring_of_rows running_mean transposed_data",
    ),
    ("REVERSE HIGHER buffers grad_params grad_vmap jacfwd jvp plain_over_jvp", "numpy_copy"),
    (
        "REVERSE HIGHER buffers grad_params grad_vmap plain_over_jvp plain_over_vmap",
        "checkpoint_of_torch_inside",
    ),
    (
        "REVERSE HIGHER grad_params grad_vmap jacfwd jvp plain_over_jvp",
        "counter mean_read_then_halved queue_slice_transposed",
    ),
    ("REVERSE HIGHER buffers grad_params grad_vmap", "hooks_inside save_on_cpu_inside"),
    ("REVERSE HIGHER forward_ad grad_params grad_vmap", "custom_op_with_autograd numpy_custom_op"),
    (
        "REVERSE grad_vmap hessian jacfwd jacrev jvp plain_over_jvp third vmap_hessian",
        "embedding_renormalized",
    ),
    ("REVERSE HIGHER grad_params", "retained_gradient"),
    (
        "batched drop forward_ad hessian jacfwd jacrev jvp jvp_grad linearize plain_over_jvp third "
        "vmap_grad vmap_hessian vmap_vmap_grad",
        "sparse_product sparse_values_shared",
    ),
    ("HIGHER double forward_ad jacfwd jvp linearize plain_over_grad plain_over_jvp", "encoder_layer"),
    ("BATCHES forward_ad hessian jacfwd jvp jvp_grad linearize plain_over_jvp third", "out_argument"),
    ("REVERSE buffers grad_params grad_vmap plain_over_vmap", "checkpoints_of_torch_around_two_layers"),
    (
        "double forward_ad grad_grad hessian jacfwd jacrev jvp jvp_grad linearize plain_over_grad "
        "plain_over_jvp third vmap_hessian",
        "attention",
    ),
    ("HIGHER BATCHES", "last_mean_stored_after_use moving_average_replaced"),
    ("HIGHER vmap_vmap_grad", "cache_of_the_first"),
    (
        "buffers grad_vmap jacfwd jvp plain_over_jvp plain_over_vmap vmap",
        "forces forces_of_a_region",
    ),
    ("HIGHER", "cache_by_rows"),
    ("BATCHES linearize", "branch_on_a_number history_of_numbers"),
    ("batched hessian third vmap_grad vmap_hessian vmap_vmap_grad", "hook_that_notes"),
    ("grad_grad hessian jacrev jvp_grad mixed vmap_hessian", "cache_of_a_draw_before_more_draws"),
    ("BATCHES", "bernoulli gru instance_norm last_result_stored lstm memory_given_by_set routed_by_a_mask"),
    ("batched plain_over_vmap two_ranks vmap_grad vmap_vmap_grad", "tiles_that_accumulate"),
    ("grad_vmap plain_over_vmap vmap vmap_grad vmap_vmap_grad", "made_channels_last_inside"),
    ("HOOKS", "gradient_inside"),
    ("grad_vmap plain_over_vmap vmap", "data_scaled"),
    ("jvp plain_over_vmap vmap_vmap_grad", "functional_jvp_inside"),
    ("forward_ad linearize", "jvp_inside"),
    ("copied", "attributes_not_to_be_iterated_or_compared"),
    (
        "forward_ad",
        "cross_entropy_head mixture_of_experts multihead_attention softmax weight_norm",
    ),
    ("third", "normalized"),
    (
        "vmap_vmap_grad",
        "boolean_mask empty_filled_by_halves index_put_accumulates "
        "lerp_and_addcmul list_of_one_memory masked_fill name_of_what_is_written_later "
        "narrow_added_to normal_around number_from_a_list result_written_in_place row_of_transpose "
        "scaled_in_place scattered view_before_a_write",
    ),
    ("BATCHES buffers_vmap", "result_stored_beside_loop result_stored_beside_scan"),
    ("buffers_vmap", "result_stored_beside_tiles"),
)
REFUSED: dict[str, set[str]] = {}
for _ways, _names in TORCH:
    for _group in _ways.split():
        for _way in GROUPS.get(_group, _group).split():
            REFUSED.setdefault(_way, set()).update(_names.split())
# Torch 2.13.0 on a CPU ends the process, without any region.
ENDS = {("native_dropout", "vmap_hessian")}
TORCHS = Expected("", "", "invalid", "", "torch alone does not run it")


def of(program: Program, way: str) -> Expected:
    """What is expected of this pair."""
    if program.name in REFUSED.get(way, ()):
        return TORCHS
    for one in OTHERWISE:
        if way in one.ways.split() and (program.tags | {program.name}) & set(one.what.split()):
            return one
    return SAME
