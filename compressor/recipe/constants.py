"""What a plan with constants must keep to: numbers may differ between layers, and every expert that goes has one."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compressor.recipe.plan import CompressionPlan


def fault_of_constants(plan: "CompressionPlan") -> str:
    """What is wrong with the constants of a plan, in one sentence with the remedy; empty if nothing is."""
    if plan.constants is None:
        found = next((layer.module for layer in plan.layers if layer.constants), None)
        return f"{found} has constants, but the plan is not of that format; restore 'constants'" if found else ""
    if plan.constants.get("format") != "mone":
        return f"the plan's constants are of format {plan.constants.get('format')!r}; known is 'mone'"
    if plan.calibration is None:
        return "constants are measured on calibration data; restore calibration or plan again"
    if plan.split is not None:
        return "a plan with constants can have no split; take it out"
    kept, said = sum(len(layer.groups) for layer in plan.layers), plan.constants.get("experts_total")
    if kept != said or (plan.layers and kept // len(plan.layers) != plan.experts):
        told = f"{said!r} in all and {plan.experts} in each"
        return f"its layers keep {kept} experts, but the plan says {told}; make them equal"
    bare = next((layer.module for layer in plan.layers if layer.dropped and not layer.constants), None)
    return f"{bare} drops experts without constants, which this format cannot; name them in 'constants'" if bare else ""
