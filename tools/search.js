// What the search box shows first: the symbol of that name, then headings, then text with all the words; where no page has them all, what is spelled like it
function smalldocsRank(index, query, limit, fuse) {
  const fold = (s) => s.toLowerCase().replace(/iz(?=[aei])/g, "is");        // normalize, normalise
  const q = fold(query), words = q.split(/\s+/), safe = (s) => s.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const phrase = new RegExp("\\b" + words.map(safe).join("\\w*\\W+"));
  const score = (e) => {
    const head = e.section || e.title, h = fold(head), title = fold(e.title), text = fold(e.text);
    if (!words.every((w) => h.includes(w) || title.includes(w) || text.includes(w))) return 0;
    const code = /^(def |source def )/.test(e.text) ? 5 : 0;                // a symbol before the word in the glossary
    let s = head === query ? 60 + code : h === q ? 50 + code : h.split(".").pop() === q ? 40 + code : h.startsWith(q) ? 20 : 0;
    s += h.includes(q) ? 10 : phrase.test(h) ? 8 : 0;
    s += words.filter((w) => h.includes(w)).length * 4 + words.filter((w) => title.includes(w)).length;
    s += text.includes(q) ? 3 : 0;
    s += phrase.test(text) ? 3 : 0;
    return s + 1 / (2 + head.length);
  };
  const hits = index.map((e) => [score(e), e]).filter(([s]) => s > 0).sort((a, b) => b[0] - a[0]).slice(0, limit).map(([, e]) => e);
  return hits.length || !fuse ? hits : fuse.search(query, { limit }).map((h) => h.item);
}
