import csv, sys, re, subprocess, collections
src, cubin = sys.argv[1], sys.argv[2]
ND="nvdisasm"
txt=subprocess.run([ND,"-g","-c",cubin],capture_output=True,text=True).stdout
lines=[]; stack=[]; pend=[]
infn=False
for l in txt.splitlines():
    if l.startswith(".text."): infn = "kog_decode" in l; continue
    if not infn: continue
    m=re.search(r'//## File "([^"]*)", line (\d+)( inlined at "([^"]*)", line (\d+))?', l)
    if m:
        pend.append((m.group(1).split("/")[-1], int(m.group(2)), (m.group(4) or "").split("/")[-1], m.group(5))); continue
    m=re.match(r'\s+(/\*[0-9a-f]+\*/)?\s*(@!?U?P\d+ )?([A-Z][A-Z0-9_.]*.*);', l)
    if m:
        if pend: stack=pend; pend=[]
        lines.append((stack, (m.group(2) or "")+m.group(3)))
rows=list(csv.reader(open(src)))
hdr=rows[1]; rows=rows[2:]
col={h:i for i,h in enumerate(hdr)}
stalls=[h for h in hdr if h.startswith("stall_") and "Not" not in h]
print(len(rows), len(lines))
out=[]
for r,(st,ins) in zip(rows,lines):
    tot=int(r[col["# Samples"]] or 0)
    d={s:int(r[col[s]] or 0) for s in stalls}
    out.append((tot,d,st,r[col["Source"]].strip(),int(r[col["Instructions Executed"]] or 0)))
import pickle
pickle.dump(out,open(src+".pkl","wb"))
total=sum(o[0] for o in out)
print("total samples",total)
agg=collections.Counter()
for o in out:
    for s,v in o[1].items(): agg[s]+=v
print(agg.most_common(12))
