"""The metadata of a model card: the YAML between the first two lines of dashes, checked as the Hub does."""

import re

import yaml  # type: ignore[import-untyped]

KNOWN_LICENCES = """
apache-2.0 mit openrail openrail++ bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0
bigcode-openrail-m afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0
cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0
cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0
cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl
gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 lgpl-lr isc h-research intel-research lppl-1.3c ms-pl apple-ascl
apple-amlr mpl-2.0 odc-by odbl openmdw-1.0 osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl
deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4
grok2-community gemma unknown other
"""
LICENCES = frozenset(KNOWN_LICENCES.split())
RELATIONS = frozenset({"adapter", "merge", "quantized", "finetune"})
TEXTS = ("library_name", "pipeline_tag", "license_name", "license_link", "base_model_relation")
LISTS = ("tags", "datasets", "metrics", "language", "base_model", "license")


def front_matter(content: str) -> str | None:
    """The YAML at the head of a card, or None."""
    match = re.match(r"\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", content, re.DOTALL | re.MULTILINE)
    return None if match is None else match.group(1)


def loaded(text: str) -> object:
    """The YAML, or a sentence on what is wrong with it."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # a date that does not exist is a ValueError
        return f"YAML Metadata Error: {' '.join(str(error).split())}"


def mistakes(found: object) -> list[str]:
    """What the Hub would not accept in the metadata of a card."""
    if not isinstance(found, dict):
        return [found if isinstance(found, str) else "metadata must be an object"]
    wrong = [f'"{key}" must be a string' for key in TEXTS if not isinstance(found.get(key, ""), str)]
    for key in LISTS:
        values = found.get(key, [])
        if not all(isinstance(value, str) for value in (values if isinstance(values, list) else [values])):
            wrong.append(f'"{key}" must be a string or an array of strings')
    licences = found.get("license", [])
    for licence in [licences] if isinstance(licences, str) else licences:
        if isinstance(licence, str) and licence not in LICENCES:
            wrong.append('"license" must be one of [' + ", ".join(sorted(LICENCES)) + "]")
    relation = found.get("base_model_relation")
    if isinstance(relation, str) and relation not in RELATIONS:
        wrong.append('"base_model_relation" must be one of [' + ", ".join(sorted(RELATIONS)) + "]")
    if not isinstance(found.get("model-index", []), list):
        wrong.append('"model-index" must be an array')
    return wrong
