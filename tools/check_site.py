"""What a reader of the site would stumble over: dead links and anchors, requests to other hosts, pages without title or
language, images without description, symbols that search does not find"""

import ast, json, re, sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
LOADS = {
    'script': 'src',
    'img': 'src',
    'iframe': 'src',
    'source': 'src',
    'video': 'src',
    'audio': 'src',
    'embed': 'src',
    'object': 'data',
}
CSS = re.compile(r'''url\(\s*["']?([^"')]+)|@import\s*["']([^"']+)''', re.I)
JS = re.compile(r'''(?:\bimport\b[^;"']*|\b(?:fetch|importScripts)\(\s*)["'](https?://[^"']+)''')


def css(s):
    return [a or b for a, b in CSS.findall(s)]


class Page(HTMLParser):
    "What there is to check in a page: links, what it loads, ids, title, language, images that nothing describes"

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.ids, self.lang, self.title, self.bare, self.inside = [], [], [], None, '', [], ''
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        d = {k: v or '' for k, v in attrs}
        if 'id' in d:
            self.ids.append(d['id'])
        if tag == 'html':
            self.lang = d.get('lang')
        if tag == 'a' and d.get('href'):
            self.links.append(d['href'])
        if tag == 'link' and not {'canonical', 'alternate'} & set(d.get('rel', '').split()):
            self.loads.append(d.get('href', ''))
        if tag in LOADS:
            self.loads.append(d.get(LOADS[tag], ''))
        self.loads += [o.split()[0] for o in d.get('srcset', '').split(', ') if o.strip()] + css(d.get('style', ''))
        if tag == 'img' and not d.get('alt'):
            self.bare.append(d.get('src', '')[:60])
        if tag in ('title', 'style', 'script'):
            self.inside = tag

    def handle_endtag(self, tag):
        if tag == self.inside:
            self.inside = ''

    def handle_data(self, s):
        if self.inside == 'title':
            self.title += s
        if self.inside == 'style':
            self.loads += css(s)
        if self.inside == 'script':
            self.loads += JS.findall(s)


def away(url):
    return bool(re.match(r'([a-z][a-z0-9+.-]*:|//)', url, re.I))


def foreign(url):
    return bool(re.match(r'(https?:|//)', url, re.I))


def targets(p, pages):
    "Links and files of page `p` that lead nowhere"
    for h in [o for o in pages[p].links + pages[p].loads if o and not away(o)]:
        path, _, frag = h.partition('#')
        path = unquote(path.split('?')[0])
        q = (p.parent / path).resolve() if path else p
        if q.is_dir():
            q = q / 'index.html'
        if not q.exists():
            yield f'broken link {h}'
        elif frag and q in pages and unquote(frag) not in pages[q].ids:
            yield f'no such anchor {h}'


def of_page(p, pages):
    "All that is wrong with page `p`"
    o = pages[p]
    if not o.title.strip():
        yield 'no title'
    if not o.lang:
        yield 'no language: <html lang="en">'
    yield from (f'loads {h}' for h in o.loads if foreign(h))
    yield from (f'image without alt text: {s}' for s in o.bare)
    yield from targets(p, pages)
    for i in {i for i in o.ids if o.ids.count(i) > 1}:
        yield f'two elements have the id {i}'
    # `## PSNR` above `psnr`: the API entry gets `psnr-1`
    for i in o.ids:
        if i.endswith('-1') and not i.startswith('toc-') and i[:-2] in o.ids:
            yield f'two headings want the anchor #{i[:-2]}'


def public(root):
    "Public functions and classes, and what is patched on other libraries' classes, of the modules in `root`"
    idx = next(
        ast.literal_eval(o.value)
        for o in ast.parse((root / '_modidx.py').read_text()).body
        if isinstance(o, ast.Assign)
    )['syms']
    for mod, syms in idx.items():
        src = ast.parse((root.parent / (mod.replace('.', '/') + '.py')).read_text()).body
        names = next(
            ast.literal_eval(o.value)
            for o in src
            if isinstance(o, ast.Assign) and getattr(o.targets[0], 'id', '') == '__all__'
        )
        own = {o.name for o in src if isinstance(o, (ast.ClassDef, ast.FunctionDef))}
        for s in (s.removeprefix(f'{mod}.') for s in syms):
            if s in names or ('.' in s and s.split('.')[0] not in own and '._' not in s):
                yield s


def check(site, package=None):
    "Complaints about the site in folder `site`, and about the search for symbols of `package`"
    site = Path(site).resolve()
    pages = {p: Page(p.read_text('utf-8')) for p in sorted(site.rglob('*.html'))}
    bad = [f'{p.relative_to(site)}: {b}' for p in pages for b in dict.fromkeys(of_page(p, pages))]
    bad += [
        f'{f.relative_to(site)}: loads {h}'
        for f in sorted(site.rglob('*.css'))
        for h in css(f.read_text('utf-8'))
        if foreign(h)
    ]
    if package is None:
        return bad
    f = site / 'search.json'
    found = {e['section'] for e in json.loads(f.read_text('utf-8'))} if f.exists() else set()
    return bad + [f'search.json: no entry for {n}' for n in public(Path(package)) if n not in found]


if __name__ == '__main__':
    bad = check(sys.argv[1] if len(sys.argv) > 1 else ROOT / '_docs', ROOT / 'robust_nbdev')
    for b in bad:
        print(b)
    sys.exit(bool(bad))
