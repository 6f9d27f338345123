"""What only a browser sees of the site: overflow, faint text, what Tab does not reach, errors of scripts, requests to
other hosts, what the search box finds"""

import fcntl, functools, json, os, select, shutil, subprocess, sys, tempfile, threading, time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FLAGS = [
    '--headless',
    '--no-sandbox',
    '--disable-gpu',
    '--no-first-run',
    '--disable-background-networking',
    '--disable-component-update',
    '--disable-sync',
    '--hide-scrollbars',
    '--remote-debugging-pipe',
]


def chromium():
    "Path of Chromium or Chrome, or None"
    return next(
        (p for o in ('chromium', 'chromium-browser', 'google-chrome', 'chrome') if (p := shutil.which(o))), None
    )


class Browser:
    "Headless Chromium with one page, driven over two pipes (DevTools protocol: JSON messages that end in a zero byte)"

    def __init__(self, exe):
        # Chromium reads from 3 and writes to 4
        pairs = [[fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in os.pipe()] for _ in range(2)]
        (theirs, self.out), (self.inp, answers) = pairs
        self.dir, self.n, self.buf, self.events = tempfile.mkdtemp(), 0, b'', []

        def wire():
            os.dup2(theirs, 3)
            os.dup2(answers, 4)

        self.proc = subprocess.Popen(
            [exe, *FLAGS, f'--user-data-dir={self.dir}', 'about:blank'],
            preexec_fn=wire,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answers)
        self.session = None
        page = next(t for t in self('Target.getTargets')['targetInfos'] if t['type'] == 'page')
        self.session = self('Target.attachToTarget', targetId=page['targetId'], flatten=True)['sessionId']
        for d in ('Page', 'Runtime', 'Network', 'Log'):
            self(f'{d}.enable')
        self('Page.setLifecycleEventsEnabled', enabled=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.proc.terminate()
        self.proc.wait(20)
        shutil.rmtree(self.dir, ignore_errors=True)

    def read(self, timeout=60):
        "The next message"
        end = time.time() + timeout
        while b'\0' not in self.buf:
            if not select.select([self.inp], [], [], max(0, end - time.time()))[0]:
                raise TimeoutError(f'Chromium said nothing for {timeout} s')
            got = os.read(self.inp, 1 << 20)
            if not got:
                raise RuntimeError('Chromium has ended')
            self.buf += got
        m, self.buf = self.buf.split(b'\0', 1)
        return json.loads(m)

    def __call__(self, method, **params):
        "Result of one command; events that come before it are kept in `events`"
        self.n += 1
        os.write(
            self.out,
            json.dumps(
                dict(id=self.n, method=method, params=params, **({'sessionId': self.session} if self.session else {}))
            ).encode()
            + b'\0',
        )
        while (m := self.read()).get('id') != self.n:
            self.events.append(m)
        if 'error' in m:
            raise RuntimeError(f"{method}: {m['error']['message']}")
        return m['result']

    def go(self, url, width=1200, height=900):
        "Open `url` in a window of `width` times `height` and wait until it has loaded"
        self('Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        this = self('Page.navigate', url=url)['loaderId']
        loaded = lambda e: (
            e.get('method') == 'Page.lifecycleEvent'
            and e['params']['loaderId'] == this
            and e['params']['name'] == 'load'
        )
        while not any(map(loaded, self.events)):
            self.events.append(self.read())
        self.js('new Promise(r => requestAnimationFrame(() => setTimeout(r, 50)))')

    def js(self, expression):
        "Value of an expression in the page"
        r = self('Runtime.evaluate', expression=expression, returnByValue=True, awaitPromise=True)
        if 'exceptionDetails' in r:
            raise RuntimeError(
                r['exceptionDetails'].get('exception', {}).get('description', r['exceptionDetails']['text'])
            )
        return r['result'].get('value')

    def key(self, key, shift=False):
        "Press and release a key: 'Tab', 'Enter', 'ArrowDown', '/'"
        code = {'Tab': 9, 'Enter': 13, 'Escape': 27, 'ArrowDown': 40, 'ArrowUp': 38}.get(key, 0)
        text = {'Enter': '\r'}.get(key, key if len(key) == 1 else '')
        for t in ('keyDown', 'keyUp')[: 1 if key == 'Tab' else 2]:
            self(
                'Input.dispatchKeyEvent',
                type=t,
                key=key,
                windowsVirtualKeyCode=code,
                modifiers=8 if shift else 0,
                **({'text': text} if text and t == 'keyDown' else {}),
            )


def tab(b):
    "What Tab does not reach on this page, or reaches without showing it"
    for _ in range(b.js('tabStart()') + 50):
        b.key('Tab')
        if not b.js('tabStep()'):
            break
    return b.js('tabEnd()')


def errors(b, host):
    "Errors that scripts and files of the page caused, and what it asked another host for"
    for e in b.events:
        p = e.get('params', {})
        if e['method'] == 'Runtime.exceptionThrown':
            yield (
                'error: '
                + p['exceptionDetails']
                .get('exception', {})
                .get('description', p['exceptionDetails']['text'])
                .split('\n')[0]
            )
        if e['method'] == 'Log.entryAdded' and p['entry']['level'] == 'error':
            yield f"error: {p['entry']['text']} {p['entry'].get('url', '')}".replace(host, '')
        if e['method'] == 'Runtime.consoleAPICalled' and p['type'] in ('error', 'assert'):
            yield 'error: ' + ' '.join(str(a.get('value')) for a in p['args'])
        if (
            e['method'] == 'Network.requestWillBeSent'
            and (u := p['request']['url']).startswith(('http', '//', 'ws'))
            and not u.startswith(host)
        ):
            yield f'asks another host: {u}'


def find(b, names, first=3):
    "Symbols that the search box does not show among its first entries"
    b.js('fetch("search.json").then(r => r.json()).then(o => { window.found = o; })')
    got = b.js(f'{json.dumps(list(names))}.map(n => smalldocsRank(window.found, n, {first}, null).map(e => e.section))')
    return [f'search for {n}: first are {g}' for n, g in zip(names, got) if n not in g]


def by_keyboard(b, name):
    "Open the search box, type a name, go to its first entry, all by keyboard; the address that opens"
    b.key('/')
    b('Input.insertText', text=name)
    for _ in range(100):
        if b.js('document.querySelectorAll(".search-result").length'):
            break
        time.sleep(0.1)
    b.events.clear()
    b.key('ArrowDown')
    b.key('Enter')
    for _ in range(100):
        if (at := b.js('location.pathname+location.hash')) != '/index.html' and b.js(
            'document.readyState'
        ) == 'complete':
            break
        time.sleep(0.1)
    return at


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def serve(site):
    "Address at which `site` is served until this process ends"
    s = ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=s.serve_forever, daemon=True).start()
    return f'http://127.0.0.1:{s.server_address[1]}/'


# between them every kind of control that pages have; Tab takes its time
KINDS = ('index.html', 'results.html', 'explorer.html')


def check(site, exe, widths=(1200, 360), pages=None):
    """Complaints about the pages of the site in folder `site`, as a browser shows them; Tab walks through the given
    ones, else through one page of each kind"""
    host = serve(site)
    with Browser(exe) as b:
        for p in pages or sorted(p.relative_to(site).as_posix() for p in Path(site).rglob('*.html')):
            for w in widths:
                b.go(host + p, w)
                b.js((HERE / 'look.js').read_text())
                bad = [
                    *b.js('look()'),
                    *(tab(b) if w == max(widths) and (pages or p in KINDS) else []),
                    *errors(b, host),
                ]
                yield from (f'{p} at {w} px: {o}' for o in dict.fromkeys(bad))


def check_search(site, exe, package):
    """Complaints about the search box: every public symbol among its first entries, and one of each module opened by
    keyboard"""
    from check_site import public

    names, host = list(public(Path(package))), serve(site)
    with Browser(exe) as b:
        b.go(host + 'index.html')
        yield from find(b, names)
        for n in ('PGD', 'Normalized', 'Learner.robust_report'):
            b.go(host + 'index.html')
            if not (at := by_keyboard(b, n)).lower().endswith('#' + n.lower()):
                yield f'search for {n} by keyboard opens {at}'


if __name__ == '__main__':
    site, exe = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / '_docs'), chromium()
    if exe is None:
        print('no Chromium here: pages were not looked at')
        sys.exit()
    t = time.time()
    bad = [
        *check(site, exe, pages=sys.argv[2:]),
        *(check_search(site, exe, ROOT / 'robust_nbdev') if not sys.argv[2:] else []),
    ]
    for o in bad:
        print(o)
    print(f'{len(bad)} complaints in {time.time() - t:.0f} s')
    sys.exit(bool(bad))
