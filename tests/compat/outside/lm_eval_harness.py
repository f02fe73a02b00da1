"""lm-eval's tasks of a local folder give the numbers that they give with transformers."""

import sys

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

TASKS = ["tiny_choice", "tiny_gen", "tiny_ppl"]


def results_of(model: str, **args: object) -> dict[str, float]:
    manager = TaskManager(include_path="lm_tasks", include_defaults=False)
    found = simple_evaluate(
        model=model, model_args={"dtype": "float32", **args}, tasks=TASKS, task_manager=manager,
        bootstrap_iters=0, log_samples=False,
    )  # fmt: skip
    values = {
        f"{task} {metric}": value
        for task, metrics in found["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, float) and "stderr" not in metric
    }
    assert len(values) >= 4, values
    return values


if __name__ == "__main__":
    ours = results_of("vllm", pretrained=sys.argv[1], max_model_len=1024)
    theirs = results_of("hf", pretrained=sys.argv[1], device="cpu")
    print(ours, theirs)
    assert ours.keys() == theirs.keys()
    assert all(abs(ours[name] - theirs[name]) <= 1e-4 * abs(theirs[name]) for name in ours)
