"""Lists keys from TRL, verl, prime-rl, ROLL, twinkle and slime with their counterparts here, for error messages."""

from __future__ import annotations

from typing import NamedTuple


class Foreign(NamedTuple):
    """Keys of other frameworks that have the same counterpart here."""

    keys: str
    """Our full keys, separated by spaces; keys below trainer.loss and orchestrator.advantage are parameters of the loss
    or the advantage. Empty if there is no counterpart."""
    why: str
    """The difference, or the reason why there is no counterpart."""
    names: str
    """The last parts of the other frameworks' keys, separated by spaces."""


FOREIGN = (
    Foreign("model.name", "", "model_name_or_path hf_checkpoint model_id pretrain pretrained_model"),
    Foreign("name", "", "run_name exp_name experiment_name"),
    Foreign("run_dir", "", "output_dir default_local_dir save_dir"),
    Foreign("max_steps", "steps, not epochs",
            "num_train_epochs total_epochs total_training_steps num_rollout num_epochs"),
    Foreign("orchestrator.group_size", "",
            "num_generations n rollouts_per_example num_return_sequences_in_group n_samples_per_prompt"),
    Foreign("orchestrator.batch_size", "rollouts of a step, not prompts",
            "per_device_train_batch_size generation_batch_size train_batch_size rollout_batch_size "
            "global_batch_size"),
    Foreign("orchestrator.seq_len", "prompts and answers together",
            "max_prompt_length max_length prompt_length sequence_length rollout_max_context_len max_seq_len "
            "max_seq_length"),
    Foreign("orchestrator.sampling.max_tokens", "of one turn; orchestrator.seq_len bounds the whole conversation",
            "max_completion_length max_new_tokens max_response_length response_length rollout_max_response_len"),
    Foreign("orchestrator.train.env.0.max_total_completion_tokens", "of each [[orchestrator.train.env]]",
            "max_output_tokens"),
    Foreign("orchestrator.train.env.0.max_turns", "of each [[orchestrator.train.env]]",
            "max_tool_calling_iterations max_assistant_turns max_actions_per_traj"),
    Foreign("orchestrator.train.env.0.id", "an environment provides the examples, the tools and the reward",
            "environment_factory reward_funcs train_dataset train_files custom_envs custom_reward_function"),
    Foreign("orchestrator.eval.env.0.id", "an environment has the examples", "eval_dataset val_files"),
    Foreign("orchestrator.eval.interval", "in steps", "eval_steps test_freq eval_freq"),
    Foreign("checkpoint.interval", "in steps", "save_steps save_freq ckpt"),
    Foreign("checkpoint.keep_last", "", "save_total_limit max_ckpt_to_keep max_actor_ckpt_to_keep"),
    Foreign("orchestrator.max_async_level", "", "async_level async_generation_ratio"),
    Foreign("orchestrator.max_off_policy_steps", "", "max_staleness staleness_threshold"),
    Foreign("orchestrator.max_concurrent", "", "max_running_requests max_concurrent_rollouts"),
    Foreign("orchestrator.oversampling_factor", "a factor", "over_sampling_batch_size"),
    Foreign("orchestrator.buffer.online_difficulty_filtering", "",
            "filter_groups dynamic_sampling_filter_path dynamic_sample"),
    Foreign("orchestrator.filters", 'a table [[orchestrator.filters]] with type = "truncated"',
            "mask_truncated_completions zero_truncated_completions overlong_filter"),
    Foreign("orchestrator.length_penalty", "a table", "overlong_buffer soft_overlong_punishment soft_max_length"),
    Foreign("orchestrator.advantage.type", '"normalized" divides by the standard deviation, "default" does not',
            "scale_rewards norm_adv_by_std_in_grpo whiten_advantages whiten_rewards"),
    Foreign("orchestrator.advantage.type trainer.loss.type", "an algorithm is an advantage and a loss",
            "adv_estimator advantage_estimator algorithm loss_type pg_variant policy_loss"),
    Foreign("trainer.loss.type", '"gspo" uses the ratio of a whole sequence', "importance_sampling_level ratio_type"),
    Foreign("trainer.loss.kl_ref_tau", "it loads the reference model too",
            "beta kl_coef kl_loss_coef use_kl_loss use_kl_in_reward kl_penalty init_kl_coef use_kl_penalty kl_beta"),
    Foreign("trainer.loss.kl_ref", "", "kl_loss_type kl_estimator"),
    Foreign("trainer.reference.model", "", "ref_model reference_model"),
    Foreign("trainer.loss.eps_low trainer.loss.eps_high", 'of type = "ppo", "gspo" and "cispo"',
            "clip_ratio pg_clip eps_clip cliprange clip_range"),
    Foreign("trainer.loss.eps_low", 'of type = "ppo", "gspo" and "cispo"',
            "epsilon epsilon_low clip_ratio_low pg_clip_low"),
    Foreign("trainer.loss.eps_high", 'of type = "ppo", "gspo" and "cispo"',
            "epsilon_high clip_ratio_high pg_clip_high eps_clip_high"),
    Foreign("trainer.loss.dual_clip", 'of type = "ppo"', "clip_ratio_c use_dual_clip dual_clip_loss eps_clip_c"),
    Foreign("trainer.loss.cap", 'of type = "tis"; the sampler\'s own logprobs are always used',
            "vllm_importance_sampling_correction vllm_importance_sampling_cap use_tis tis_clip tis_imp_ratio_cap"),
    Foreign("trainer.loss.dppo_mask_low", "", "token_mask_low"),
    Foreign("trainer.loss.dppo_mask_high", "", "token_mask_high"),
    Foreign("trainer.micro_batch_tokens", "micro-batches are sized by tokens, and do not change the gradient",
            "gradient_accumulation_steps micro_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
            "ppo_max_token_len_per_gpu use_dynamic_bsz max_tokens_per_gpu per_device_batch_size"),
    Foreign("trainer.optimizer_steps_per_batch", "a batch is split into this many parts, each trained once",
            "num_iterations steps_per_generation ppo_mini_batch_size ppo_epochs mini_batch_size"),
    Foreign("trainer.optim.lr", "", "learning_rate"),
    Foreign("trainer.optim.schedule", "", "lr_scheduler_type lr_warmup_style lr_decay_style scheduler"),
    Foreign("trainer.optim.warmup_steps", "in optimizer steps", "warmup_ratio lr_warmup_steps lr_warmup_steps_ratio"),
    Foreign("trainer.optim.beta1", "", "adam_beta1 betas1"),
    Foreign("trainer.optim.beta2", "", "adam_beta2 betas2"),
    Foreign("trainer.optim.eps", "", "adam_epsilon adam_eps"),
    Foreign("trainer.optim.max_grad_norm", "", "max_norm grad_clip clip_grad"),
    Foreign("trainer.dtype", "", "bf16 fp16 torch_dtype mixed_precision"),
    Foreign("trainer.lora.r", "", "lora_r lora_rank rank peft_config"),
    Foreign("trainer.lora.alpha", "", "lora_alpha"),
    Foreign("trainer.lora.dropout", "", "lora_dropout"),
    Foreign("trainer.lora.target_modules", "", "lora_target_modules lora_target"),
    Foreign("trainer.gradient_checkpointing", "", "ac enable_gradient_checkpointing recompute_granularity"),
    Foreign("trainer.activation_offload", "", "ac_offloading enable_activation_offload"),
    Foreign("trainer.parallel.processes", "", "dp_replicate fsdp_size dp_size"),
    Foreign("trainer.parallel.processes cluster.backend", "the number of ranks; [cluster] places them on nodes",
            "n_gpus_per_node num_gpus_per_node nnodes actor_num_nodes actor_num_gpus_per_node resource_pool"),
    Foreign("cluster.replicas inference.vllm.replicas", "[cluster] places them on nodes", "rollout_num_gpus"),
    Foreign("cluster.address", "", "ray_kwargs ray_init"),
    Foreign("trainer.parallel.sequence", "", "cp ulysses_sequence_parallel_size context_parallel_size ulysses_size"),
    Foreign("model.name trainer.optim.lr inference.backend", "the tables [model], [trainer] and [inference]",
            "actor_rollout_ref actor actor_train actor_infer"),
    Foreign("inference.backend", '"vllm"', "use_vllm rollout_backend"),
    Foreign("inference.vllm.colocate", "", "vllm_mode"),
    Foreign("inference.vllm.gpu_memory_utilization", "", "vllm_gpu_memory_utilization"),
    Foreign("inference.vllm.tensor_parallel_size", "", "tp vllm_tensor_parallel_size tensor_model_parallel_size"),
    Foreign("inference.vllm.weight_transfer", "", "weight_broadcast"),
    Foreign("monitor.save_trajectories", "", "log_completions rollout_data_dir"),
    Foreign("monitor", "a table [monitor.wandb], [monitor.mlflow] or [monitor.tensorboard]",
            "report_to wandb logger tracker"),
    Foreign("", "every step is logged", "logging_steps log_freq"),
    Foreign("", "[orchestrator.eval] evaluates before, during and after training", "val_before_train eval_on_start"),
    Foreign("", "the reference model is frozen", "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha"),
    Foreign("", "each sampled token has the same weight, regardless of the length of its rollout",
            "loss_agg_mode ratio_length_norm loss_aggregation"),
    Foreign("", 'no loss has an entropy bonus; select your own with type = "my_module.my_loss" under [trainer.loss]',
            "entropy_coeff entropy_coef entropy_loss_coef top_entropy_quantile"),
    Foreign("", 'there is no value model; type = "chunk_returns" under [orchestrator.advantage] credits each turn',
            "critic lam lambd gae_lambda cliprange_value vf_coef value_loss_coef"),
    Foreign("", "rewards are what `score` returns: weight, clip or scale them there",
            "reward_weights reward_clip reward_scale reward_shift reward_normalization"),
    Foreign("", "advantages are not clipped; the loss bounds the ratio", "advantage_clip"),
    Foreign("", "only sampled tokens are trained", "mask_env_responses mask_tool_responses"),
    Foreign("", "the trainer could not reproduce the distribution that was sampled from", "repetition_penalty"),
    Foreign("", "a token keeps the version that sampled it; orchestrator.max_off_policy_steps drops stale rollouts",
            "mask_offpolicy_in_partial_rollout partial_rollout"),
    Foreign("", "the full logits are never in memory; trainer.logprob_chunk bounds their size",
            "use_liger_kernel use_fused_kernels"),
    Foreign("", "only activations can be offloaded: trainer.activation_offload",
            "param_offload optimizer_offload fsdp_cpu_offload optim_cpu_offload"),
)  # fmt: skip
_BY_NAME = {name: row for row in FOREIGN for name in row.names.split()}
_MOVED = {
    "orchestrator.rollout.ray.cpus_per_worker": "cluster.worker.cpus",
    "orchestrator.rollout.ray.address": "cluster.address",
    "orchestrator.rollout.ray.host": "cluster.host",
    "orchestrator.rollout.ray.port": "cluster.port",
}
_ALONE = "with cluster.roles = [], only rollout workers are placed on the cluster"


def moved_to(name: str) -> str:
    """Where a key is now, as the end of a sentence; empty for any other key.

    Args:
        name: The full key, with underscores.

    >>> moved_to("orchestrator.rollout.ray.port").partition(";")[0]
    'is now cluster.port'
    """
    now = _MOVED.get(name)
    return "" if now is None else f"is now {now}; {_ALONE}"


def key_elsewhere(key: str) -> str:
    """What to type instead of a key of another framework, as the end of a sentence; empty for any other key.

    >>> key_elsewhere("num-generations"), key_elsewhere("sync_ref_model")
    ('; here it is orchestrator.group_size.', '; there is none here: the reference model is frozen.')
    """
    row = _BY_NAME.get(key.lower().replace("-", "_"))
    if row is None:
        return ""
    if not row.keys:
        return f"; there is none here: {row.why}."
    return f"; here it is {' and '.join(row.keys.split())}{f' ({row.why})' if row.why else ''}."
