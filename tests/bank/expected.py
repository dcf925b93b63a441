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
    "vjp_twice grad_vmap buffers forward_ad"
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
        "plain_over_vmap",
        "raw",
        "same invalid refused failed",
        "",
        "a region under vmap runs again, and what fills memory past torch fills it anew: wrong, and not told",
    ),
    Expected(
        "plain_over_vmap grad_vmap vmap_vmap_grad",
        "write_that_one_level_differentiates complex_write_that_one_level_differentiates",
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
        "hessian jacrev jacfwd grad_grad third mixed vmap_hessian linearize plain_over_grad plain_over_jvp "
        "jvp_grad jvp forward_ad",
        "scripted_module",
        "invalid",
        "TorchScript",
        "torch's own derivatives of TorchScript depend on how often it was called",
    ),
    Expected(
        "vmap_grad vmap grad_vmap",
        "scripted_module",
        "same refused invalid",
        "TorchScript|change from run to run|",
        "torch's optimized code refuses operands with batches, from the second call on (docs/limits.md)",
    ),
    Expected(
        "counted",
        "cache_by_rows cache_of_the_first cached_table cache_of_a_draw cache_of_a_draw_before_more_draws "
        "cache_of_a_sobol_sequence",
        "same failed",
        "unlike",
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
        "grad_grad plain_over_grad third mixed",
        "data_scaled",
        "same refused invalid",
        "reads `.data`|",
        "a region that torch.func differentiates twice refuses `.data` (docs/limits.md)",
    ),
    Expected(
        "buffers_grad",
        "parts_of_a_state_among_the_arguments",
        "same failed",
        "derivatives|",
        "open, and silent: a derivative through a view that is written without gradients, in a region in a "
        "region under two levels that differentiate in reverse",
    ),
    Expected(
        LEVELS,
        "buffer_that_is_written_later buffers_that_come_to_overlap statistics_that_are_frozen "
        "memory_that_layers_share_or_do_not alias_of_numpys_in_later_calls constant_of_another_sign "
        "begun_again_amid_writes_and_draws hooks_before_a_transform two_batch_norms_in_regions "
        "mean_read_written_and_read counter_that_scales_in_regions state_among_the_arguments "
        "parts_of_a_state_among_the_arguments",
        "same invalid refused",
        "",
        "torch.func refuses writes to captured tensors, and hooks; and torch its own formula for copysign",
    ),
    Expected(
        LEVELS,
        "dual_level_inside",
        "same invalid",
        "Nested forward|",
        "torch has no forward mode in forward mode by plain dual levels",
    ),
    Expected(
        "vjp vjp_twice",
        "begun_again_before_a_draw",
        "same refused",
        "does not repeat|",
        "a tensor that no walk finds is met amid the run: told, where it could be right",
    ),
    Expected(
        LEVELS,
        "one_activation_on_two_layouts",
        "same failed",
        "derivatives|",
        "under torch.func dropout of what is not contiguous draws another mask (docs/limits.md)",
    ),
    Expected(
        LEVELS,
        "torch_cond_in_torch_cond",
        "same failed",
        "Expected FakeTensor|",
        "torch.cond, which compiles itself, in torch.cond that a region under two levels keeps: loud",
    ),
    Expected(
        LEVELS,
        "force_in_later_calls",
        "same refused invalid",
        "requires_grad_|",
        "torch.func refuses a leaf inside, which a region may make in some ways (docs/limits.md)",
    ),
    Expected("third", "forces energy_and_forces", "refused invalid", "requires_grad_", "torch's own refusal"),
    Expected(
        "third plain_over_jvp",
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
        "mixed",
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
# What torch cannot run without remat, either, in any way of these.
_FUNC = "grad grad_params vmap_grad jvp vjp hessian jacrev jacfwd grad_grad "
_FUNC += (
    "third mixed vmap_hessian plain_over_grad plain_over_jvp plain_over_vmap jvp_grad vmap vmap_vmap_grad "
    "value_and_grad vjp_twice grad_vmap"
)
_NO_FUNC = (
    "batch_norm_before_a_forward_derivative queue_pushed_in_a_region_inside "
    "delayed_scaling queue_of_features convolution_and_batch_norm "
    "batch_norm_in_a_region_inside running_mean queue_head queue_shifted batch_norm "
    "batch_norm_twice mean_lerped queue_flat_view accumulating_backward_inside old_function "
    "attribute_on_a_context partly_saving_function number_from_numpy raw_fill "
    "written_through_numpy map_in_place backward_of_a_layer_inside gradient_through_batch_norm "
    "dirty_function transposed_data layer_that_accumulates_in_its_backward reversible_pair "
    "data_replaced ring_of_rows numpy_in_a_region_inside data_replaced_in_a_region_inside "
    "cache_of_a_sobol_sequence late_bound_layers_that_numpy_sees"
)
# And by way.
TORCH = {
    "backward": ("argument_written"),
    "twice": ("argument_written"),
    "double": ("encoder_layer attention_in_torchs_checkpoint attention argument_written"),
    "partial": ("argument_written"),
    "accumulate": ("argument_written"),
    "two_forwards": ("counter_assigned queue_flat_view argument_written"),
    "reversed": ("counter_assigned queue_flat_view argument_written"),
    "drop": ("sparse_product sparse_values_shared argument_written"),
    "thread": ("argument_written"),
    "threads": ("argument_written"),
    "copied": ("dictionary_not_to_be_iterated object_that_answers_nothing argument_written"),
    "again": ("counter_assigned queue_flat_view argument_written"),
    "update": ("argument_written"),
    "batched": (
        "tiles_that_accumulate hook_that_notes sparse_product sparse_values_shared "
        "layer_that_accumulates_in_its_backward reversible_pair argument_written"
    ),
    "anomaly": ("argument_written"),
    "forward_ad": (
        "encoder_layer attention_by_hand mixture_of_experts gated_linear_unit "
        "cross_entropy_head queue_of_features attention_in_torchs_checkpoint softmax attention "
        "logsumexp weight_norm multihead_attention jvp_inside sparse_product out_argument "
        "old_function attribute_on_a_context partly_saving_function custom_op_with_autograd "
        "numpy_custom_op raw_fill dirty_function sparse_values_shared "
        "layer_that_accumulates_in_its_backward reversible_pair argument_written"
    ),
    "grad": (
        "checkpoints_of_torch_around_two_layers checkpoint_of_torch_around_a_region "
        "attention_in_torchs_checkpoint counter "
        "counter_assigned mean_read_then_halved queue_slice_transposed retained_gradient "
        "custom_op_with_autograd embedding_renormalized checkpoint_of_torch_inside numpy_copy "
        "numpy_custom_op hooks_inside save_on_cpu_inside argument_written"
    ),
    "grad_params": (
        "checkpoints_of_torch_around_two_layers checkpoint_of_torch_around_a_region "
        "attention_in_torchs_checkpoint counter "
        "counter_assigned mean_read_then_halved queue_slice_transposed retained_gradient "
        "custom_op_with_autograd checkpoint_of_torch_inside numpy_copy numpy_custom_op "
        "hooks_inside save_on_cpu_inside argument_written"
    ),
    "vmap_grad": (
        "made_channels_last_inside checkpoints_of_torch_around_two_layers routed_by_a_mask "
        "lstm moving_average_replaced early_exit "
        "checkpoint_of_torch_around_a_region attention_in_torchs_checkpoint logged_probe "
        "counter counter_assigned mean_read_then_halved queue_slice_transposed bernoulli "
        "last_result_stored last_mean_stored_after_use history_of_numbers hook_that_notes "
        "retained_gradient branch_on_a_number gru sparse_product out_argument "
        "custom_op_with_autograd embedding_renormalized checkpoint_of_torch_inside numpy_copy "
        "numpy_custom_op hooks_inside save_on_cpu_inside instance_norm memory_given_by_set "
        "sparse_values_shared tiles_that_accumulate argument_written"
    ),
    "jvp": (
        "encoder_layer energy_and_forces attention_in_torchs_checkpoint forces_of_a_region "
        "attention counter counter_assigned mean_read_then_halved queue_slice_transposed "
        "sparse_product out_argument forces embedding_renormalized numpy_copy "
        "sparse_values_shared functional_jvp_inside"
    ),
    "vjp": (
        "checkpoints_of_torch_around_two_layers checkpoint_of_torch_around_a_region "
        "attention_in_torchs_checkpoint counter "
        "counter_assigned mean_read_then_halved queue_slice_transposed retained_gradient "
        "custom_op_with_autograd embedding_renormalized checkpoint_of_torch_inside numpy_copy "
        "numpy_custom_op hooks_inside save_on_cpu_inside argument_written"
    ),
    "hessian": (
        "cache_of_a_draw cache_of_a_draw_before_more_draws encoder_layer moving_average_replaced "
        "checkpoint_of_torch_around_a_region "
        "attention_in_torchs_checkpoint attention counter counter_assigned "
        "mean_read_then_halved queue_slice_transposed cache_by_rows cache_of_the_first "
        "last_mean_stored_after_use hook_that_notes retained_gradient sparse_product "
        "out_argument custom_op_with_autograd embedding_renormalized "
        "checkpoint_of_torch_inside numpy_copy numpy_custom_op hooks_inside save_on_cpu_inside "
        "sparse_values_shared"
    ),
    "jacrev": (
        "cache_of_a_draw cache_of_a_draw_before_more_draws encoder_layer moving_average_replaced "
        "checkpoint_of_torch_around_a_region "
        "attention_in_torchs_checkpoint attention counter counter_assigned "
        "mean_read_then_halved queue_slice_transposed cache_by_rows cache_of_the_first "
        "last_mean_stored_after_use retained_gradient sparse_product custom_op_with_autograd "
        "embedding_renormalized checkpoint_of_torch_inside numpy_copy numpy_custom_op "
        "hooks_inside save_on_cpu_inside sparse_values_shared"
    ),
    "jacfwd": (
        "encoder_layer energy_and_forces attention_in_torchs_checkpoint forces_of_a_region "
        "attention counter counter_assigned mean_read_then_halved queue_slice_transposed "
        "sparse_product out_argument forces embedding_renormalized numpy_copy "
        "sparse_values_shared"
    ),
    "grad_grad": (
        "cache_of_a_draw cache_of_a_draw_before_more_draws checkpoints_of_torch_around_two_layers "
        "encoder_layer "
        "moving_average_replaced checkpoint_of_torch_around_a_region "
        "attention_in_torchs_checkpoint attention counter counter_assigned "
        "mean_read_then_halved queue_slice_transposed cache_by_rows cache_of_the_first "
        "last_mean_stored_after_use retained_gradient custom_op_with_autograd "
        "embedding_renormalized checkpoint_of_torch_inside numpy_copy numpy_custom_op "
        "hooks_inside save_on_cpu_inside argument_written"
    ),
    "third": (
        "cache_of_a_draw encoder_layer moving_average_replaced checkpoint_of_torch_around_a_region "
        "attention_in_torchs_checkpoint attention normalized counter counter_assigned "
        "mean_read_then_halved queue_slice_transposed cache_by_rows cache_of_the_first "
        "last_mean_stored_after_use hook_that_notes retained_gradient sparse_product "
        "out_argument custom_op_with_autograd embedding_renormalized "
        "checkpoint_of_torch_inside numpy_copy numpy_custom_op hooks_inside save_on_cpu_inside "
        "sparse_values_shared"
    ),
    "mixed": (
        "cache_of_a_draw cache_of_a_draw_before_more_draws encoder_layer moving_average_replaced "
        "checkpoint_of_torch_around_a_region "
        "attention_in_torchs_checkpoint counter counter_assigned mean_read_then_halved "
        "queue_slice_transposed cache_by_rows cache_of_the_first last_mean_stored_after_use "
        "retained_gradient custom_op_with_autograd checkpoint_of_torch_inside numpy_copy "
        "numpy_custom_op hooks_inside save_on_cpu_inside argument_written"
    ),
    "vmap_hessian": (
        "cache_of_a_draw cache_of_a_draw_before_more_draws encoder_layer routed_by_a_mask lstm "
        "moving_average_replaced early_exit "
        "checkpoint_of_torch_around_a_region attention_in_torchs_checkpoint logged_probe "
        "attention counter counter_assigned mean_read_then_halved queue_slice_transposed "
        "bernoulli cache_by_rows cache_of_the_first last_result_stored "
        "last_mean_stored_after_use history_of_numbers hook_that_notes retained_gradient "
        "branch_on_a_number gru sparse_product out_argument custom_op_with_autograd "
        "embedding_renormalized checkpoint_of_torch_inside numpy_copy numpy_custom_op "
        "hooks_inside save_on_cpu_inside instance_norm memory_given_by_set "
        "sparse_values_shared"
    ),
    "linearize": (
        "encoder_layer early_exit attention_in_torchs_checkpoint logged_probe attention "
        "history_of_numbers jvp_inside branch_on_a_number sparse_product out_argument "
        "old_function attribute_on_a_context partly_saving_function raw_fill dirty_function "
        "sparse_values_shared layer_that_accumulates_in_its_backward reversible_pair"
    ),
    "plain_over_grad": (
        "checkpoints_of_torch_around_two_layers encoder_layer "
        "checkpoint_of_torch_around_a_region attention_in_torchs_checkpoint "
        "attention counter counter_assigned mean_read_then_halved queue_slice_transposed "
        "retained_gradient custom_op_with_autograd embedding_renormalized "
        "checkpoint_of_torch_inside numpy_copy numpy_custom_op hooks_inside save_on_cpu_inside "
        "argument_written"
    ),
    "plain_over_jvp": (
        "encoder_layer energy_and_forces checkpoint_of_torch_around_a_region "
        "attention_in_torchs_checkpoint forces_of_a_region attention counter counter_assigned "
        "mean_read_then_halved queue_slice_transposed sparse_product out_argument forces "
        "embedding_renormalized checkpoint_of_torch_inside numpy_copy sparse_values_shared "
        "argument_written"
    ),
    "plain_over_vmap": (
        "routed_by_a_mask lstm moving_average_replaced energy_and_forces early_exit "
        "made_channels_last_inside checkpoint_of_torch_around_a_region "
        "checkpoints_of_torch_around_two_layers attention_in_torchs_checkpoint forces_of_a_region "
        "logged_probe scripted_module bernoulli last_result_stored last_mean_stored_after_use "
        "history_of_numbers branch_on_a_number gru out_argument forces checkpoint_of_torch_inside "
        "instance_norm memory_given_by_set tiles_that_accumulate data_scaled functional_jvp_inside"
    ),
    "vmap_vmap_grad": (
        "routed_by_a_mask lstm moving_average_replaced early_exit made_channels_last_inside "
        "result_written_in_place checkpoint_of_torch_around_a_region "
        "checkpoints_of_torch_around_two_layers attention_in_torchs_checkpoint "
        "name_of_what_is_written_later logged_probe counter counter_assigned mean_read_then_halved "
        "queue_slice_transposed bernoulli normal_around cache_of_the_first last_result_stored "
        "last_mean_stored_after_use history_of_numbers hook_that_notes retained_gradient "
        "branch_on_a_number number_from_a_list boolean_mask sum_of_a_mask gru sparse_product "
        "out_argument custom_op_with_autograd embedding_renormalized checkpoint_of_torch_inside "
        "numpy_copy numpy_custom_op hooks_inside save_on_cpu_inside instance_norm "
        "memory_given_by_set sparse_values_shared tiles_that_accumulate scaled_in_place "
        "empty_filled_by_halves row_of_transpose masked_fill narrow_added_to indices_copied "
        "scattered augmented_assignments lerp_and_addcmul view_before_a_write index_put_accumulates "
        "list_of_one_memory argument_written functional_jvp_inside"
    ),
    "jvp_grad": (
        "cache_of_a_draw cache_of_a_draw_before_more_draws checkpoints_of_torch_around_two_layers "
        "encoder_layer "
        "moving_average_replaced checkpoint_of_torch_around_a_region "
        "attention_in_torchs_checkpoint attention counter counter_assigned "
        "mean_read_then_halved queue_slice_transposed cache_by_rows cache_of_the_first "
        "last_mean_stored_after_use retained_gradient sparse_product out_argument "
        "custom_op_with_autograd embedding_renormalized checkpoint_of_torch_inside numpy_copy "
        "numpy_custom_op hooks_inside save_on_cpu_inside sparse_values_shared argument_written"
    ),
    "vmap": (
        "data_scaled routed_by_a_mask lstm moving_average_replaced energy_and_forces early_exit "
        "made_channels_last_inside forces_of_a_region logged_probe scripted_module bernoulli "
        "last_result_stored last_mean_stored_after_use history_of_numbers branch_on_a_number "
        "gru out_argument forces instance_norm memory_given_by_set"
    ),
    "value_and_grad": (
        "checkpoints_of_torch_around_two_layers checkpoint_of_torch_around_a_region "
        "attention_in_torchs_checkpoint counter "
        "counter_assigned mean_read_then_halved queue_slice_transposed retained_gradient "
        "custom_op_with_autograd embedding_renormalized checkpoint_of_torch_inside numpy_copy "
        "numpy_custom_op hooks_inside save_on_cpu_inside argument_written"
    ),
    "vjp_twice": (
        "checkpoint_of_torch_around_a_region checkpoints_of_torch_around_two_layers "
        "attention_in_torchs_checkpoint counter counter_assigned mean_read_then_halved "
        "queue_slice_transposed retained_gradient custom_op_with_autograd "
        "embedding_renormalized checkpoint_of_torch_inside numpy_copy numpy_custom_op "
        "hooks_inside save_on_cpu_inside argument_written"
    ),
    "grad_vmap": (
        "made_channels_last_inside checkpoints_of_torch_around_two_layers routed_by_a_mask "
        "lstm moving_average_replaced energy_and_forces early_exit "
        "checkpoint_of_torch_around_a_region attention_in_torchs_checkpoint forces_of_a_region "
        "logged_probe scripted_module counter counter_assigned mean_read_then_halved "
        "queue_slice_transposed bernoulli last_result_stored last_mean_stored_after_use "
        "history_of_numbers branch_on_a_number gru out_argument forces custom_op_with_autograd "
        "embedding_renormalized checkpoint_of_torch_inside numpy_copy numpy_custom_op "
        "hooks_inside save_on_cpu_inside instance_norm memory_given_by_set data_scaled"
    ),
    "buffers": (
        "cache_of_a_sobol_sequence late_bound_layers_that_numpy_sees numpy_in_a_region_inside "
        "data_replaced_in_a_region_inside "
        "checkpoints_of_torch_around_two_layers energy_and_forces "
        "checkpoint_of_torch_around_a_region attention_in_torchs_checkpoint "
        "forces_of_a_region accumulating_backward_inside forces old_function "
        "attribute_on_a_context partly_saving_function checkpoint_of_torch_inside numpy_copy "
        "number_from_numpy raw_fill written_through_numpy map_in_place "
        "backward_of_a_layer_inside gradient_through_batch_norm hooks_inside "
        "save_on_cpu_inside dirty_function layer_that_accumulates_in_its_backward "
        "reversible_pair argument_written data_replaced"
    ),
    "in_checkpoint": ("transform_inside_over_a_region implicit_step gradient_inside argument_written"),
    "in_scan": ("queue_flat_view counter_assigned argument_written"),
    "counted": ("transform_inside_over_a_region implicit_step gradient_inside argument_written"),
    "cloned": ("implicit_step transform_inside_over_a_region gradient_inside argument_written"),
    "on_cpu": ("transform_inside_over_a_region implicit_step gradient_inside argument_written"),
    # A backward of its own gives weights their gradients: the wrapper takes that for a second use.
    "two_ranks": "layer_that_accumulates_in_its_backward tiles_that_accumulate reversible_pair",
}
REFUSED = {
    way: frozenset([*names.split(), *(_NO_FUNC.split() if way in _FUNC.split() else ())])
    for way, names in {**dict.fromkeys(_FUNC.split(), ""), **TORCH}.items()
}
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
