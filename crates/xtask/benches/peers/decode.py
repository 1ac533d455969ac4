"""Greedy decoding with transformers' `generate`, plain or assisted by the draft."""

from common import RECIPE, ROOT, arguments, load, read_prompts, serve

args = arguments(num_prompts=16, assisted=False, candidate_length=5)
prompts = read_prompts(ROOT / RECIPE["evaluate"]["prompts"][0], args.num_prompts)
target = load("target")
options = dict(
    do_sample=False,
    use_cache=True,
    max_new_tokens=RECIPE["evaluate"]["max_new_tokens"],
    pad_token_id=target.generation_config.eos_token_id,
)
if args.assisted:
    draft = load("draft")
    # `generate` takes these settings from the assistant.
    draft.generation_config.num_assistant_tokens = args.candidate_length
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0
    options["assistant_model"] = draft


def answer(prompt):
    return target.generate(prompt, **options)[0, prompt.shape[1] :].tolist()


def work():
    answers = [answer(prompt) for prompt in prompts]
    prompt_ids = [prompt[0].tolist() for prompt in prompts]
    return {"num_tokens": sum(map(len, answers)), "prompt_ids": prompt_ids, "token_ids": answers}


serve(args, lambda: answer(prompts[0]), work)
