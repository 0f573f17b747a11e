"""The only prompt definition, for training and evaluation alike: system prompt, markers and chat
template of Appendix E.4, and templates that take their place."""

import json

from sage_lib.errors import SageError

WORK_START, WORK_END = "<start_working_out>", "<end_working_out>"
SOLUTION_START, SOLUTION_END = "<SOLUTION>", "</SOLUTION>"
#: The paper's four markers (Appendix E.4).
MARKERS = (WORK_START, WORK_END, SOLUTION_START, SOLUTION_END)

#: Appendix E.4, word for word.
SYSTEM_PROMPT = (
    "You are given a problem. Think about the problem and provide your working out. "
    f"Place it between {WORK_START} and {WORK_END}. "
    f"Then, provide your solution between {SOLUTION_START} and {SOLUTION_END}."
)

#: "The chat template used by the tokenizer follows the Unsloth implementation" (Appendix E.4): the
#: system prompt, then every turn, the system's and the assistant's closed by the end-of-text token;
#: a generation prompt opens the working-out marker.
CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' -%}"
    "{{ messages[0]['content'] + eos_token }}{%- set turns = messages[1:] -%}"
    "{%- else -%}"
    "{{ '" + SYSTEM_PROMPT + "' + eos_token }}{%- set turns = messages -%}"
    "{%- endif -%}"
    "{%- for turn in turns -%}"
    "{%- if turn['role'] == 'user' -%}{{ turn['content'] }}"
    "{%- elif turn['role'] == 'assistant' -%}{{ turn['content'] + eos_token }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '" + WORK_START + "' }}{%- endif -%}"
)


def chat_template(prompt: str, of_model: str | None) -> str:
    """Return a chat template for :func:`messages`.

    Args:
        prompt: "paper" is the paper's. "system" is ``of_model``. "model" is ``of_model`` without
            the paper's system prompt. All else is a text with {question}.
        of_model: the chat template that comes with the model.

    Returns:
        A template in Jinja. SageError where the model has none, and for another text.
    """
    if prompt == "paper":
        return CHAT_TEMPLATE
    if prompt in ("system", "model") and not of_model:
        raise SageError("the model's tokenizer has no chat template: give a text with {question}")
    if prompt == "system":
        return str(of_model)
    if prompt == "model":
        is_paper = f"messages[0]['content'] == {json.dumps(SYSTEM_PROMPT)}"
        return (
            f"{{%- if {is_paper} -%}}{{%- set messages = messages[1:] -%}}{{%- endif -%}}{of_model}"
        )
    before, marker, after = prompt.partition("{question}")
    if not marker:
        raise SageError(
            f"the prompt {prompt!r:.60} is none of paper, system and model, and has no {{question}}"
        )
    return (
        "{%- for turn in messages -%}{%- if turn['role'] == 'user' -%}{{ "
        f"{_quoted(before)} + turn['content'] + {_quoted(after)}"
        " }}{%- elif turn['role'] == 'assistant' -%}{{ turn['content'] + eos_token }}"
        "{%- endif -%}{%- endfor -%}"
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # Jinja would read an emoji's two halves apart


def messages(question: str) -> list[dict[str, str]]:
    """Return the prompt of a question: system prompt (Appendix E.4) and one user turn."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def split_completion(text: str) -> tuple[list[str], list[str] | None]:
    """Return the words of the work, and of an answer that stands alone in its markers, if any."""
    work, marker, answer = text.removeprefix(WORK_START).partition(WORK_END)
    answer = answer.strip()
    if not (marker and answer.startswith(SOLUTION_START) and answer.endswith(SOLUTION_END)):
        return work.split(), None
    return work.split(), answer.removeprefix(SOLUTION_START).removesuffix(SOLUTION_END).split()


def answer_turn(working: str, answer: str, boxed: bool = False) -> str:
    r"""Return the assistant's turn for a worked answer: with all four markers (Appendix E.4), or
    with the answer in \boxed{...} after the work."""
    if boxed:
        return f"{working} \\boxed{{{answer}}}"
    return f"{WORK_START}{working}{WORK_END}{SOLUTION_START}{answer}{SOLUTION_END}"
