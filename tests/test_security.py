"""SECURITY.md, sentence by sentence: each of its promises, and the tests that would fail if it were broken."""

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROMISES: Mapping[str, tuple[str, ...]] = {  # by the sentence, with its tests as FILE::FUNCTION
    "None of its code runs: `trust_remote_code` stays off, and pickle files are refused.": (
        "compressor/checkpoint/test_reader.py::test_damaged_checkpoint_is_refused",
        "compressor/model/test_carried.py::test_the_output_names_no_code_where_the_rest_loads_without",
        "compressor/model/test_carried.py::test_a_tokenizer_that_needs_its_own_code_is_refused",
        "compressor/model/test_opened.py::test_a_config_names_no_kernels",
    ),
    "Headers are checked against the file's own size.": (
        "compressor/checkpoint/test_reader.py::test_damaged_checkpoint_is_refused",
    ),
    "Shards outside the folder, links out of it, and links to hidden files are refused.": (
        "compressor/checkpoint/test_reader.py::test_damaged_index_is_refused",
        "compressor/checkpoint/test_links.py::test_a_link_out_of_the_folder_is_refused_by_name",
        "compressor/checkpoint/test_links.py::test_a_link_to_a_hidden_file_is_refused_by_name",
    ),
    "A chat template runs in Jinja's sandbox, and only its text counts.": (
        "compressor/model/test_tokenizer.py::test_a_template_runs_in_a_sandbox",
    ),
    "They're read as data, by a list of fields: nothing in them is an option that trusts, or moves a margin.": (
        "compressor/test_malformed_files.py::test_malformed_files_are_refused_in_one_sentence",
        "compressor/test_damaged_files.py::test_plan",
        "compressor/test_damaged_files.py::test_hubs",
        "compressor/test_damaged_files.py::test_gate",
    ),
    "They're shown as text: neither names nor a model's output can inject markup or terminal commands, or turn the "
    "direction of a line.": (
        "compressor/document/test_terminal.py::test_nothing_is_taken_for_markup",
        "compressor/cli/test_messages.py::test_a_sentence_hides_nothing",
        "compressor/quality_gate/test_report.py::test_no_name_turns_the_direction_of_what_follows",
        "compressor/quality_gate/test_behaviour_report.py"
        "::test_the_page_begins_with_what_went_wrong_and_escapes_all_text",
        "compressor/hub/test_card.py::test_no_name_does_harm",
    ),
    "Long texts are tokenised only as far as needed, and a document of more than 134 million characters is refused.": (
        "compressor/quality_gate/test_teacher_forced.py::test_long_texts_are_tokenised_as_far_as_positions_allow",
        "compressor/data/test_documents.py::test_a_document_without_end_is_refused",
    ),
    "Rows that can't be read are left out and counted in one warning; `--strict` stops at the first.": (
        "compressor/data/test_documents.py::test_bad_rows_are_left_out_with_one_warning_or_refused",
    ),
    "Only files in the folder of the data or in `$MOE_COMPRESSOR_MEDIA` are opened, without links out of it.": (
        "compressor/data/test_media.py::test_pictures_lie_in_the_folder_of_the_data_or_where_the_user_allows",
    ),
    "Messages don't reveal whether a forbidden file exists, and no address is fetched.": (
        "compressor/data/test_media.py::test_pictures_lie_in_the_folder_of_the_data_or_where_the_user_allows",
        "compressor/data/test_media.py::test_a_bad_row_is_named_in_one_sentence",
    ),
    "Pictures are opened as PNG, JPEG, WebP, GIF, BMP, TIFF or PPM, whatever their suffix.": (
        "compressor/data/test_media.py::test_no_program_is_run",
    ),
    "Redirects aren't followed, and a key goes to the named server only.": (
        "compressor/answers/test_server.py::test_no_behaviour_of_a_server_does_harm",
        "compressor/answers/test_server.py::test_wrong_servers_are_one_sentence",
    ),
    "A whole answer, tries included, must arrive within `--timeout`, in at most 34 million bytes.": (
        "compressor/answers/test_server.py::test_no_answer_outlasts_its_timeout",
    ),
    "What it leaves out, or isn't a finite number, passes no check.": (
        "compressor/golden/test_golden.py::test_what_was_not_answered_is_no_pass",
        "compressor/golden/test_golden.py::test_answers_that_are_no_numbers_are_different",
    ),
    "Journal lines and layer files that can't be read are made again.": (
        "compressor/answers/test_server.py::test_unreadable_lines_of_a_journal_are_asked_again",
        "compressor/steps/test_workdir.py::test_a_file_that_was_cut_short_is_made_again",
    ),
    "Bad input ends in one sentence and exit status 2, and leaves no partial output.": (
        "test_compress.py::test_a_bad_checkpoint",
        "test_compress.py::test_bad_arguments",
    ),
    "Both are removed from messages, warnings and records.": (
        "compressor/test_errors.py::test_the_token_in_use_goes_whatever_it_looks_like",
        "compressor/test_run_record.py::test_names_that_look_like_a_token_are_kept_nowhere",
        "compressor/answers/test_server.py::test_wrong_servers_are_one_sentence",
    ),
    "`push` searches for secrets before publishing.": (
        "compressor/hub/test_secrets.py::test_a_file_that_holds_a_secret_is_refused_by_name",
        "compressor/hub/test_secrets.py::test_every_kind_is_known_in_every_spelling",
    ),
}


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_promise_has_its_tests() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    promising = text[text.index("## Not trusted") : text.index("## Not promised")]
    sentences = list[str]()
    for line in promising.splitlines():
        _, dash, promises = line.partition(" \N{EN DASH} ")
        if dash:
            sentences += re.split(r"(?<=[.])\s+(?=[A-Z`])", promises)
    assert sentences == list(PROMISES)


def test_the_tests_of_promises_are_there() -> None:
    for names in PROMISES.values():
        for name in names:
            file, _, function = name.partition("::")
            assert function in functions(file), name
