// What check_pages.py asks of a page, in the browser: look() for what can be seen, tabStart(), tabStep(), tabEnd() for the keyboard.

function nameOf(e) {
  const text = e.textContent.trim() || e.getAttribute('aria-label') || '';
  return '<' + e.tagName.toLowerCase() + '> "' + text.replace(/\s+/g, ' ').slice(0, 40) + '"';
}

function rgba(c) {
  const v = (c.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
  return v.length > 3 ? v : [...v, 1];
}

function over(a, b) {
  return [0, 1, 2].map((i) => a[3] * a[i] + (1 - a[3]) * b[i]);
}

function luminance(c) {
  const [r, g, b] = c.map((v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

var known = new Map();

// the colour behind an element, its opacity, whether a picture is there
function behind(e) {
  if (!e) return [[255, 255, 255], 1, false];
  if (!known.has(e)) {
    const s = getComputedStyle(e);
    const [colour, opacity, picture] = behind(e.parentElement);
    const here = over(rgba(s.backgroundColor), colour);
    known.set(e, [here, opacity * s.opacity, picture || s.backgroundImage.includes('url(')]);
  }
  return known.get(e);
}

function hasText(e) {
  if (!(e instanceof HTMLElement) || e.closest('script, style, option, .katex-mathml')) return false;
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) return false;
  return e.checkVisibility({ opacityProperty: true, visibilityProperty: true });
}

function contrast(e) {
  const s = getComputedStyle(e);
  const [back, faint, picture] = behind(e);
  if (picture) return [];
  const size = parseFloat(s.fontSize);
  const large = size >= 24 || (size >= 18.66 && +s.fontWeight >= 700);
  const least = large ? 3 : 4.5;
  const fore = rgba(s.color);
  fore[3] *= faint;
  const [a, b] = [luminance(over(fore, back)), luminance(back)].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  return ratio < least ? [`contrast ${ratio.toFixed(1)}, should be ${least}: ${nameOf(e)}`] : [];
}

function look() {
  known.clear();
  const say = [];
  const width = document.scrollingElement.scrollWidth;
  const all = [...document.querySelectorAll('body *')];
  if (width > innerWidth) {
    const far = all.filter((e) => e.getBoundingClientRect().right > innerWidth + 1);
    say.push(`wider than the window: ${width} of ${innerWidth} px, ${far.length ? nameOf(far.at(-1)) : ''}`);
  }
  for (const i of document.images) {
    if (!i.alt.trim()) say.push('image without alt text: ' + i.outerHTML.slice(0, 60));
  }
  for (const e of all.filter(hasText)) say.push(...contrast(e));
  return say;
}

function styleOf(e) {
  const s = getComputedStyle(e);
  const shown = [s.outlineStyle, s.outlineWidth, s.boxShadow, s.borderColor, s.backgroundColor];
  return [...shown, s.textDecoration, s.color, s.opacity].join();
}

var CONTROLS = [
  'a[href]', 'button', 'input', 'select', 'textarea', 'summary',
  '[onclick]', '[role=button]', '[data-bs-toggle]', '[tabindex]',
].join(', ');

function tabStart() {
  const all = [...document.querySelectorAll(CONTROLS)]
    .filter((e) => e.checkVisibility({ visibilityProperty: true }))
    .filter((e) => !e.closest('[role=presentation], [tabindex="-1"]'));
  window.tabbed = { all, before: new Map(all.map((e) => [e, styleOf(e)])), seen: new Set(), plain: [] };
  document.body.tabIndex = -1;
  document.body.focus();
  document.body.removeAttribute('tabindex');
  return all.length;
}

function tabStep() {
  const e = document.activeElement;
  const t = window.tabbed;
  if (e === document.body || t.seen.has(e)) return false;
  t.seen.add(e);
  if (t.before.has(e) && t.before.get(e) === styleOf(e)) t.plain.push(e);
  return true;
}

function tabEnd() {
  const t = window.tabbed;
  const missed = t.all.filter((e) => !t.seen.has(e)).map((e) => 'Tab does not reach ' + nameOf(e));
  return [...missed, ...t.plain.map((e) => 'focus cannot be seen on ' + nameOf(e))];
}
