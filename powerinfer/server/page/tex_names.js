// The names of TeX that tex.js knows, and the letters that they stand for.

function pairs(text) {
  const all = text.trim().split(/\s+/);
  return new Map(all.flatMap((name, k) => (k % 2 ? [] : [[name, all[k + 1]]])));
}

/** Letters: mi. Capital Greek is upright. */
export const LETTERS = pairs(`alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι
kappa κ varkappa ϰ lambda λ mu μ nu ν xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ
varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω
infty ∞ partial ∂ nabla ∇ hbar ℏ ell ℓ Re ℜ Im ℑ wp ℘ aleph ℵ beth ℶ emptyset ∅ varnothing ∅ imath ı jmath ȷ top ⊤ bot ⊥
angle ∠ measuredangle ∡ triangle △ square □ Box □ blacksquare ■ diamond ⋄ prime ′ backprime ‵ degree ° eth ð complement ∁
clubsuit ♣ diamondsuit ♢ heartsuit ♡ spadesuit ♠ flat ♭ natural ♮ sharp ♯ checkmark ✓ dag † ddag ‡ S § P ¶ pounds £ euro €
ldots … dots … dotsc … dotsb ⋯ dotsm ⋯ cdots ⋯ vdots ⋮ ddots ⋱ forall ∀ exists ∃ nexists ∄`);

/** Operators and relations: mo. */
export const OPERATORS = pairs(`pm ± mp ∓ times × div ÷ cdot ⋅ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗
oslash ⊘ odot ⊙ cap ∩ cup ∪ uplus ⊎ sqcap ⊓ sqcup ⊔ wedge ∧ land ∧ vee ∨ lor ∨ setminus ∖ smallsetminus ∖ wr ≀ amalg ⨿
dagger † ddagger ‡ lnot ¬ neg ¬ leq ≤ le ≤ geq ≥ ge ≥ leqslant ⩽ geqslant ⩾ ll ≪ gg ≫ lll ⋘ ggg ⋙ neq ≠ ne ≠ equiv ≡ sim ∼
simeq ≃ approx ≈ approxeq ≊ cong ≅ propto ∝ varpropto ∝ doteq ≐ asymp ≍ prec ≺ succ ≻ preceq ⪯ succeq ⪰ subset ⊂ supset ⊃
subseteq ⊆ supseteq ⊇ subsetneq ⊊ supsetneq ⊋ nsubseteq ⊈ sqsubseteq ⊑ sqsupseteq ⊒ in ∈ notin ∉ ni ∋ mid ∣ nmid ∤ parallel ∥
nparallel ∦ perp ⟂ vdash ⊢ dashv ⊣ models ⊨ vDash ⊨ lesssim ≲ gtrsim ≳ triangleq ≜ coloneqq ≔ bowtie ⋈ smile ⌣ frown ⌢
to → rightarrow → gets ← leftarrow ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ implies ⟹ impliedby ⟸ iff ⟺
longrightarrow ⟶ longleftarrow ⟵ longleftrightarrow ⟷ Longrightarrow ⟹ Longleftarrow ⟸ Longleftrightarrow ⟺ mapsto ↦ longmapsto ⟼
hookrightarrow ↪ hookleftarrow ↩ uparrow ↑ downarrow ↓ updownarrow ↕ Uparrow ⇑ Downarrow ⇓ nearrow ↗ searrow ↘ swarrow ↙ nwarrow ↖
rightharpoonup ⇀ rightharpoondown ⇁ leftharpoonup ↼ leftharpoondown ↽ rightleftharpoons ⇌ leadsto ⇝ rightsquigarrow ⇝ upharpoonright ↾
therefore ∴ because ∵ colon : vert | Vert ‖ backslash \\ lt < gt > And &`);

/** Large operators: limits above and below (in a line of text beside), or beside always. */
export const LARGE = pairs(`sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigsqcup ⨆ bigvee ⋁ bigwedge ⋀ bigoplus ⨁ bigotimes ⨂ bigodot ⨀ biguplus ⨄`);
export const INTEGRALS = pairs(`int ∫ iint ∬ iiint ∭ oint ∮ oiint ∯ oiiint ∰ smallint ∫`);

const words = (text) => new Set(text.trim().split(/\s+/));
export const FUNCTIONS = words(`sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan exp log ln lg arg deg dim hom ker sgn tr rank`);
export const LIMIT_FUNCTIONS = new Map(
  [..."lim max min sup inf det gcd Pr argmax argmin".split(" ").map((name) => [name, name]), ["limsup", "lim sup"], ["liminf", "lim inf"]],
);

/** What may stand after \left, \right, \middle and \big. */
export const DELIMITERS = new Map([
  ...["(", ")", "[", "]", "|", "/", "<", ">"].map((char) => [char, { "<": "⟨", ">": "⟩" }[char] ?? char]),
  ...pairs(`\\{ { \\} } \\lbrace { \\rbrace } \\lbrack [ \\rbrack ] \\| ‖ \\vert | \\Vert ‖ \\lvert | \\rvert | \\lVert ‖ \\rVert ‖ \\langle ⟨ \\rangle ⟩
    \\lfloor ⌊ \\rfloor ⌋ \\lceil ⌈ \\rceil ⌉ \\lgroup ⟮ \\rgroup ⟯ \\uparrow ↑ \\downarrow ↓ \\updownarrow ↕ \\Uparrow ⇑ \\Downarrow ⇓ \\backslash \\`),
  [".", ""],
]);

/** Accents: the letter, whether it is as wide as what it stands over, and on which side. */
export const ACCENTS = new Map(
  Object.entries({
    hat: ["^"], check: ["ˇ"], tilde: ["~"], bar: ["‾"], vec: ["→"], dot: ["˙"], ddot: ["¨"], dddot: ["⃛"], acute: ["´"], grave: ["`"], breve: ["˘"],
    mathring: ["˚"], widehat: ["^", true], widetilde: ["~", true], overline: ["‾", true], overrightarrow: ["→", true], overleftarrow: ["←", true],
    overbrace: ["⏞", true], underline: ["_", true, "under"], underbrace: ["⏟", true, "under"],
  }),
);

export const ARROWS = new Map(Object.entries({ xrightarrow: "→", xleftarrow: "←", xleftrightarrow: "↔", xRightarrow: "⇒", xLeftarrow: "⇐", xmapsto: "↦" }));

export const SPACES = new Map(
  Object.entries({ ",": 0.1667, ":": 0.2222, ">": 0.2222, ";": 0.2778, "!": -0.1667, " ": 0.25, "\n": 0.25, enspace: 0.5, quad: 1, qquad: 2, thinspace: 0.1667, space: 0.25 }),
);

export const SIZES = new Map([..."big Big bigg Bigg".split(" ")].flatMap((name, k) => ["", "l", "r", "m"].map((side) => [name + side, 1.2 + 0.6 * k])));

/** Commands that choose an alphabet, and its first code points: A, a, 0, Α, α. */
const BOLD = [0x1d400, 0x1d41a, 0x1d7ce, 0x1d6a8, 0x1d6c2];
export const ALPHABETS = new Map(
  Object.entries({
    mathbf: BOLD, bm: [0x1d468, 0x1d482, 0x1d7ce, 0x1d71c, 0x1d736], boldsymbol: [0x1d468, 0x1d482, 0x1d7ce, 0x1d71c, 0x1d736], mathbb: [0x1d538, 0x1d552, 0x1d7d8],
    mathcal: [0x1d49c, 0x1d4b6], mathscr: [0x1d49c, 0x1d4b6], mathfrak: [0x1d504, 0x1d51e], mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2],
    mathtt: [0x1d670, 0x1d68a, 0x1d7f6], mathrm: [], mathit: null, mathnormal: null,
  }),
);
// Letters that stood in Unicode before the alphabets: their places there are empty.
const EARLIER = new Map(
  [..."BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ".matchAll(/(.)(.)/gu)].map(([, a, b]) => [`${0x1d49c}${a}`, b])
    .concat([..."CℂHℍNℕPℙQℚRℝZℤ".matchAll(/(.)(.)/gu)].map(([, a, b]) => [`${0x1d538}${a}`, b]))
    .concat([..."CℭHℌIℑRℜZℨ".matchAll(/(.)(.)/gu)].map(([, a, b]) => [`${0x1d504}${a}`, b])),
);

/** A letter or digit in one of the alphabets. */
export function inAlphabet(char, alphabet) {
  if (!alphabet?.length) return char;
  const earlier = EARLIER.get(`${alphabet[0]}${char}`);
  if (earlier) return earlier;
  const from = [["A", "Z"], ["a", "z"], ["0", "9"], ["Α", "Ω"], ["α", "ω"]].findIndex(([first, last]) => char >= first && char <= last);
  return from < 0 || !alphabet[from] ? char : String.fromCodePoint(alphabet[from] + char.codePointAt(0) - "Aa0Αα".codePointAt(from));
}

/** Environments: the delimiters around, and how columns are aligned (the last two are repeated). */
const aligned = { columns: ["right", "left"], display: true };
const centred = { columns: ["center"], display: true };
export const ENVIRONMENTS = new Map(
  Object.entries({
    matrix: {}, smallmatrix: {}, pmatrix: { left: "(", right: ")" }, bmatrix: { left: "[", right: "]" }, Bmatrix: { left: "{", right: "}" },
    vmatrix: { left: "|", right: "|" }, Vmatrix: { left: "‖", right: "‖" }, array: { argument: true },
    cases: { left: "{", right: "", columns: ["start"] }, rcases: { left: "", right: "}", columns: ["start"] },
    aligned, align: aligned, "align*": aligned, split: aligned, eqnarray: aligned, "eqnarray*": aligned,
    gathered: centred, gather: centred, "gather*": centred, equation: centred, "equation*": centred, multline: centred, "multline*": centred,
  }),
);
