// What the page shows before it is asked: a prompt to try, and one round of it, made up.

const EXAMPLES = { text: "When I was young, my father told me", chat: "Why is the sky blue? Answer in three sentences." };

const EXAMPLE_ROUND = {
  round: 0,
  base_length: 9,
  token_ids: [11, 12, 13, 14, 15, 16, 17, 18, 19, 20],
  parents: [-1, -1, -1, 0, 0, 0, 1, 4, 4, 7],
  probabilities: [0.62, 0.19, 0.08, 0.34, 0.31, 0.12, 0.44, 0.58, 0.21, 0.47],
  texts: [" that", " to", " of", " the", " he", " I", " be", " had", " was", " been"],
  accepted_nodes: [0, 4, 7],
  committed_ids: [11, 15, 18, 21],
  committed_texts: [" that", " he", " had", " not"],
  pieces: [" that", " he", " had", " not"],
  parameters: {},
  draft_seconds: 0.008,
  verify_seconds: 0.041,
};

const EXAMPLE = { rounds: [EXAMPLE_ROUND], textBefore: EXAMPLES.text, first: "", tail: "" };
